"""The runtime on emulated devices against the simulator, on the same durations.

    python scripts/bench/runtime_vs_simulator.py [--json FILE]

4 ranks, 32 microbatches. First the makespan: BF with constant tasks of 5/10 ms and of
20/40 ms, transfers of 1 ms, real over simulated. Then the speed-up of BF over fixed
1F1B under J3 (RRFP §7.6) with lognormal transfers, 20/40 ms tasks, over 5 paired seeds,
in the runtime and in the simulator.
"""

import argparse
import functools
import json
import pathlib
import statistics

import jax

NUM_RANKS, NUM_MICROBATCHES = 4, 32
jax.config.update("jax_num_cpu_devices", NUM_RANKS)  # before the first use

import toy
import tqdm

from rrfp_jax import Policy
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.sim import costs
from rrfp_jax.sim.costs import CostTable

NUM_SEEDS = 5
BF = Policy(hint="bf")
FIXED = Policy(hint="1f1b", order="fixed")


def constant(forward_ms: float, graph: PipelineGraph) -> CostTable:
    """Returns constant costs, the backward twice the forward, transfers of 1 ms."""
    return costs.constant(graph, forward_ms / 1e3, forward_ms / 500, 1e-3)


def disturbed(seed: int, graph: PipelineGraph) -> CostTable:
    """Returns 20/40 ms under J3, with transfers of 2 ms and CV 1."""
    table = costs.constant(graph, 20e-3, 40e-3, 2e-3)
    table = costs.with_injected(table, costs.LEVELS["J3"], seed)
    return costs.with_lognormal_transfers(table, 1.0, seed)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    both = toy.Both(NUM_RANKS, NUM_MICROBATCHES)
    both.compile(BF)
    figures: dict[str, float] = {}
    print(f"{'':>28} {'real s':>8} {'simulated s':>12} {'ratio':>6}")
    for forward_ms in (5, 20):
        durations = functools.partial(constant, forward_ms)
        runs = [both(BF, durations) for _ in range(3)]
        real_s, simulated_s, _ = sorted(runs, key=lambda ran: ran.real_s)[1]
        ratio = real_s / simulated_s
        name = f"BF, {forward_ms}/{2 * forward_ms} ms, median of 3"
        print(f"{name:>28} {real_s:8.3f} {simulated_s:12.3f} {ratio:6.3f}")
        figures[f"makespan_ratio_{forward_ms}ms"] = ratio
    speedups = []
    for seed in tqdm.tqdm(range(NUM_SEEDS), "paired seeds", leave=False):
        durations = functools.partial(disturbed, seed)
        fixed, ours = both(FIXED, durations), both(BF, durations)
        speedups.append(
            (fixed.real_s / ours.real_s, fixed.simulated_s / ours.simulated_s)
        )
    real, simulated = (statistics.mean(each) for each in zip(*speedups, strict=True))
    print(
        f"speed-up of BF over 1F1B under J3: {real:.3f} real, {simulated:.3f} simulated"
    )
    figures |= {"speedup_runtime": real, "speedup_simulator": simulated}
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
