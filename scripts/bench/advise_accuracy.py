"""What `rrfp_jax.advise` predicts, against what the runtime then does.

    python scripts/bench/advise_accuracy.py [--json FILE] [--seed N]

The real runtime on 8 emulated ranks, 32 microbatches. F, B and W take 9 to 11 ms by
stage; the first four stages are a vision tower, whose tasks all take the images of
their microbatch (CV 0.4); one task in ten is followed by a sleep of half its time on
average (J1 of RRFP §7.6, with no least length); transfers take 2 ms, CV 0.6.

One run, BFW with 16 microbatches in flight, is traced for 24 steps and fitted; 12
others run 24 steps each. They face the same 24 draws among each other, and other draws
than the traced run: what the fit cannot know is which microbatches will come. That is
most of the error: the mean load of 24 steps of 32 microbatches has a standard error of
1.4 % where the vision tower is the bottleneck, on either side, and both are the same
for all 12. `known` is what is left if these draws are known: the error of the
simulator, with the host's latency as fitted, on the durations that the runs had. The
runs take turns, step by step, so that they share what else the machine does.
`--num_traced` shows what fewer traced steps do.
"""

import argparse
import functools
import json
import pathlib
import statistics
import tempfile

import jax

NUM_RANKS, NUM_MICROBATCHES = 8, 32
jax.config.update("jax_num_cpu_devices", NUM_RANKS)  # before the first use

import toy
import tqdm

from rrfp_jax import Policy, advise
from rrfp_jax.core import trace
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.sim import costs, fit, fit_cut, fit_host
from rrfp_jax.sim.costs import CostTable, InjectedJitter
from rrfp_jax.sim.fit_candidates import Candidate, Prediction
from rrfp_jax.sim.fit_draws import Settings

NUM_TRACED, NUM_MEASURED = 24, 24
TASK_S = (0.009, 0.010, 0.011, 0.010)  # of stage s: TASK_S[s % 4]
JITTER = InjectedJitter(probability=0.1, base_s=0.0, alpha=0.5)
TRACED = Policy("bfw", in_flight_limit=16, launch_ahead=1)
OTHERS = (
    Policy("1f1b", "fixed", launch_ahead=1),
    Policy("1f1b", in_flight_limit=16, launch_ahead=1),
    Policy("bf", in_flight_limit=8, launch_ahead=1),
    Policy("bf", in_flight_limit=16, launch_ahead=2),
    Policy("bf", in_flight_limit=32, launch_ahead=1),
    Policy("fb", in_flight_limit=16, launch_ahead=1),
    Policy("b_priority", in_flight_limit=14, launch_ahead=1),
    Policy("bfw", in_flight_limit=8, launch_ahead=1),
    Policy("bfw", in_flight_limit=14, launch_ahead=2),
    Policy("bfw", in_flight_limit=32, launch_ahead=1),
    Policy("bfw_memory", in_flight_limit=16, launch_ahead=1),
    Policy("zb_h1", in_flight_limit=8, launch_ahead=1),
)


def drawn(seed: int, graph: PipelineGraph) -> CostTable:
    """Returns the durations of a seed."""
    each_s = [TASK_S[s % len(TASK_S)] for s in range(graph.num_stages)]
    table = costs.constant(graph, each_s, each_s, 0.002, weight_s=each_s)
    vision = range(graph.num_stages // 2)
    table = costs.with_image_load(table, vision, 0.4, seed)
    table = costs.with_injected(table, JITTER, seed)
    return costs.with_lognormal_transfers(table, 0.6, seed)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_traced", type=int, default=NUM_TRACED)
    flags = parser.parse_args()
    both = toy.Both(NUM_RANKS, NUM_MICROBATCHES)
    for policy in (TRACED, OTHERS[0]):
        both.compile(policy)
    first = 1000 * flags.seed
    fitted, measured = _run(both, first, flags.num_traced)
    (cut, *_) = fit_cut.cuts(fitted)
    settings = Settings(seed=flags.seed)
    predicted, _ = advise.compare(fitted, [Candidate(cut, p) for p in OTHERS], settings)
    seeds = range(first + 500, first + 500 + NUM_MEASURED)
    known = _known(fitted, seeds)
    figures = _compare(predicted, measured, known)
    print(
        f"host latency {fitted.latency_s * 1e6:.0f} us; largest error "
        f"{figures['max_error']:.2%}, known {figures['max_known_error']:.2%}; "
        f"spread of the errors {figures['error_spread']:.2%}; "
        f"predicted fastest over the fastest {figures['picked_over_best']:.4f}"
    )
    if flags.json:
        flags.json.write_text(json.dumps(figures) + "\n")


def _run(
    both: toy.Both, first: int, num_traced: int
) -> tuple[fit.Fit, dict[Policy, float]]:
    """Runs everything, step by step in turn.

    Returns:
      The fit of the traced run, from files; and the mean step time of each of the
      others, as the host saw it.
    """
    steps_s: dict[Policy, list[float]] = {policy: [] for policy in OTHERS}
    rounds = range(max(num_traced, NUM_MEASURED))
    with (
        tempfile.TemporaryDirectory() as name,
        tqdm.tqdm(total=num_traced + NUM_MEASURED * len(OTHERS), disable=None) as bar,
    ):
        folder = pathlib.Path(name)
        for i in rounds:
            if i < num_traced:
                ran = both.real(TRACED, functools.partial(drawn, first + i))
                path = folder / f"step_{i:06d}.trace.json"
                path.write_text(trace.to_json(ran))
                bar.update()
            for policy in OTHERS if i < NUM_MEASURED else ():
                ran = both.real(policy, functools.partial(drawn, first + 500 + i))
                steps_s[policy].append(fit_host.step_s(ran))
                bar.update()
        fitted = fit.fit(advise.read(folder))
    return fitted, {policy: statistics.fmean(each) for policy, each in steps_s.items()}


def _known(fitted: fit.Fit, seeds: range) -> dict[Policy, float]:
    """Returns mean step times simulated on the very durations of the others' steps."""
    found = {}
    for policy in OTHERS:
        graph = policy.applied_to(fitted.graph)
        traces = [
            fit_host.simulate(graph, policy, drawn(seed, graph), fitted.latency_s)
            for seed in seeds
        ]
        found[policy] = statistics.fmean(fit_host.step_s(each) for each in traces)
    return found


def _compare(
    predicted: list[Prediction],
    measured: dict[Policy, float],
    known: dict[Policy, float],
) -> dict[str, float]:
    """Prints a table, and returns the figures."""
    print(f"{'':40} {'predicted ms':>12} {'measured ms':>12} {'error':>7} {'known':>7}")
    errors, of_known = [], []
    for each in predicted:
        policy = each.candidate.policy
        real_s = measured[policy]
        errors.append(each.mean_s / real_s - 1)
        of_known.append(known[policy] / real_s - 1)
        print(
            f"{each.candidate.name:40} {each.mean_s * 1e3:12.1f} "
            f"{real_s * 1e3:12.1f} {errors[-1]:+7.2%} {of_known[-1]:+7.2%}"
        )
    picked_s = measured[predicted[0].candidate.policy]
    return {
        "max_error": max(map(abs, errors)),
        "mean_error": statistics.fmean(errors),
        "error_spread": statistics.stdev(errors),
        "max_known_error": max(map(abs, of_known)),
        "picked_over_best": picked_s / min(measured.values()),
    }


if __name__ == "__main__":
    main()
