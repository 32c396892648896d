"""Weight gradients as filler: BFW on emulated devices, and what determinism costs.

    python scripts/bench/weight_filler.py [--json FILE] [--launch_ahead=2]

The real runtime on 8 emulated ranks, 32 microbatches, F = B = W = 10 ms, transfers of
2 ms, all lognormal with CV 0.6; 5 seeds, each the same for every policy. In flight: 16
microbatches, but for fixed 1F1B, which holds 8. The baselines run whole backwards, as
long as B and W of the same draws. Speed-ups are paired by seed, and stand beside those
of the simulator on the same durations.

Last, `bfw_memory` on a V, with two stages a rank, each half as long: at most as many
residual bytes on any rank as fixed 1F1B's first one holds, if a stage half as long
keeps half as much. (The toy's stages all keep the same: the limit is twice its peak.)
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics

import jax

NUM_RANKS, NUM_MICROBATCHES = 8, 32
jax.config.update("jax_num_cpu_devices", NUM_RANKS)  # before the first use

import toy
import tqdm

from rrfp_jax import Policy
from rrfp_jax.core import memory, placement
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.sim import costs
from rrfp_jax.sim.costs import CostTable

NUM_SEEDS, LIMIT = 5, 16
BASELINE, DEEP, FILLER = "1F1B, fixed", "1F1B of depth 16, fixed", "BFW"
DETERMINISTIC = "BFW, deterministic"
ON_A_V = "BFW memory, V, at 1F1B's"
POLICIES = {
    BASELINE: Policy("1f1b", "fixed"),
    DEEP: Policy("eager_1f1b", "fixed"),
    "ZB-H2, fixed": Policy("zb_h2", "fixed"),
    "BF": Policy("bf", in_flight_limit=LIMIT),
    FILLER: Policy("bfw", in_flight_limit=LIMIT),
    DETERMINISTIC: Policy("bfw", in_flight_limit=LIMIT, deterministic=True),
}


def disturbed(seed: int, graph: PipelineGraph) -> CostTable:
    """Returns the durations of a seed."""
    each_s = 0.01 * NUM_RANKS / graph.num_stages
    table = costs.constant(graph, each_s, each_s, 0.002, weight_s=each_s)
    table = costs.with_lognormal(table, 0.6, seed)
    return costs.with_lognormal_transfers(table, 0.6, seed)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--launch_ahead", type=int, default=2)
    flags = parser.parse_args()
    both = toy.Both(NUM_RANKS, NUM_MICROBATCHES)
    on_a_v = toy.Both(NUM_RANKS, NUM_MICROBATCHES, placement.v_shaped(NUM_RANKS))
    chosen = {
        name: dataclasses.replace(policy, launch_ahead=flags.launch_ahead)
        for name, policy in POLICIES.items()
    }
    traces = {name: both.compile(policy) for name, policy in chosen.items()}
    peak = max(traces[BASELINE].peak_bytes())
    chosen[ON_A_V] = Policy(
        "bfw_memory",
        in_flight_limit=7 * NUM_RANKS // 4,
        in_flight_taper=0.5,
        memory_limit_gb=2 * peak / memory.GIB,
        launch_ahead=flags.launch_ahead,
    )
    on_a_v.compile(chosen[ON_A_V])
    found: dict[str, list[toy.Ran]] = {name: [] for name in chosen}
    for seed in tqdm.tqdm(range(NUM_SEEDS), "paired seeds", leave=False, disable=None):
        for name, policy in chosen.items():
            where = on_a_v if name == ON_A_V else both
            ran = where(policy, functools.partial(disturbed, seed))
            assert name != ON_A_V or max(ran.trace.peak_bytes()) <= 2 * peak
            found[name].append(ran)
    print(
        f"{'':26} {'real s':>7} {'simulated':>9} {'ratio':>6} {'in flight':>9} "
        f"{'speed-up':>9} {'simulated':>9}"
    )
    figures: dict[str, dict[str, float]] = {}
    for name, runs in found.items():
        real, simulated, ran_traces = zip(*runs, strict=True)
        depth = max(max(trace.peak_in_flight()) for trace in ran_traces)
        each = figures[name] = {
            "real_s": statistics.mean(real),
            "simulated_s": statistics.mean(simulated),
            "peak_in_flight": depth,
            "speedup": _speedup(found, BASELINE, name, 0),
            "simulated_speedup": _speedup(found, BASELINE, name, 1),
        }
        print(
            f"{name:26} {each['real_s']:7.3f} {each['simulated_s']:9.3f} "
            f"{each['real_s'] / each['simulated_s']:6.3f} {depth:9} "
            f"{each['speedup']:9.3f} {each['simulated_speedup']:9.3f}"
        )
    deep = [_speedup(found, DEEP, FILLER, which) for which in (0, 1)]
    print(f"BFW over 1F1B of its depth: {deep[0]:.3f} real, {deep[1]:.3f} simulated")
    cost = 1 / _speedup(found, FILLER, DETERMINISTIC, 0) - 1
    print(f"determinism: {cost:+.2%} of the makespan of BFW")
    if flags.json:
        flags.json.write_text(json.dumps(figures, indent=2) + "\n")


def _speedup(found: dict[str, list[toy.Ran]], over: str, of: str, which: int) -> float:
    """Returns the mean of paired ratios; `which` is 0 for real, 1 for simulated."""
    pairs = zip(found[over], found[of], strict=True)
    return statistics.mean(a[which] / b[which] for a, b in pairs)


if __name__ == "__main__":
    main()
