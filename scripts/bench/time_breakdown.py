"""Where a step's time goes: the paper's breakdown (RRFP §8), simulated.

    python scripts/bench/time_breakdown.py [--seeds=5] [--letter_ms=0.2]
        [--json FILE] [--out=docs/bench]

Qwen3-4B + ViT-Big on 16 ranks, a batch of 32, TP 1, 2 and 4: fixed 1F1B with blocking
transfers, BF and BFW. Seconds of a rank, on average: compute; waiting by its cause (see
`rrfp_jax.sim.bubbles`); and what the agreement of a rank's processes costs, which is
how much longer the step is than with letters that take no time. The members of a rank
get their parts of a payload at times that differ with a CV of 0.1; a letter from one to
another takes 0.2 ms, half of what was measured between busy processes on this machine.
The paper's own figures stand beside.
"""

import statistics
from collections.abc import Sequence
from typing import Any

import suite
from matplotlib import figure
from suite import Ran

from rrfp_jax import workload_files
from rrfp_jax.sim import agreed, costs, report
from rrfp_jax.workloads.stage_times import Workload

RANKS, BATCH, VARIANT = 16, 32, "qwen3_4b_vit_big"
TENSORS = (1, 2, 4)
MEMBER_CV = 0.1
PUBLISHED_S = {  # compute, waiting, agreement
    (1, "1F1B"): (0.859, 1.722, 0.0),
    (1, "BF"): (1.020, 0.768, 0.0),
    (2, "1F1B"): (0.946, 1.698, 0.0),
    (2, "BF"): (1.026, 0.788, 0.010),
    (4, "1F1B"): (0.938, 1.812, 0.0),
    (4, "BF"): (1.054, 0.873, 0.015),
}
CONTENDERS = {
    "1F1B": suite.fixed("1f1b", True),
    "BF": suite.readiness("bf"),
    "BFW": suite.readiness("bfw"),
}
COLOURS = {
    "compute": "#0072b2",
    "fill_drain": "#bbbbbb",
    "input": "#e69f00",
    "transfer": "#cc79a7",
    "held": "#666666",
}


def run(workload: Workload, name: str, seed: int, letter_s: float) -> tuple[Ran, float]:
    """Returns a step, and what agreement added to it."""
    contender = CONTENDERS[name]
    graph = suite.chain(RANKS, BATCH)
    if workload.tensor == 1 or contender.policy.order == "fixed":
        return suite.simulate(workload, contender, graph, seed), 0.0
    graph = contender.policy.applied_to(graph)
    table = workload.draw(graph, seed)
    members = [
        costs.with_lognormal_transfers(table, MEMBER_CV, 1000 * (seed + 1) + member)
        for member in range(workload.tensor)
    ]
    kept = workload.residuals(graph)
    trace, free = (
        agreed.simulate(graph, contender.policy, table, members, each_s, kept).trace
        for each_s in (letter_s, 0.0)
    )
    added_s = trace.makespan_s - free.makespan_s
    return Ran(trace.makespan_s, report.report(trace)), added_s


def line(tensor: int, name: str, ran: Sequence[tuple[Ran, float]]) -> dict[str, Any]:
    """Returns a row of the table: seconds of a rank, on average."""
    runs = [each for each, _ in ran]

    def mean_s(of: str) -> float:
        return statistics.fmean(getattr(r.report.bubble, of) / RANKS for r in runs)

    seconds = {
        "compute_s": statistics.fmean(statistics.fmean(r.report.busy_s) for r in runs),
        "fill_drain_s": mean_s("fill_drain_s"),
        "input_s": mean_s("input_s"),
        "transfer_s": mean_s("transfer_s"),
        "held_s": mean_s("held_s"),
        "agreement_s": statistics.fmean(added_s for _, added_s in ran),
    }
    theirs = PUBLISHED_S.get((tensor, name), ("", "", ""))
    return {
        "tp": tensor,
        "contender": name,
        "transfers": CONTENDERS[name].transfers,
        "step_s": round(suite.mean_s(runs), 4),
        **{what: round(each_s, 4) for what, each_s in seconds.items()},
        "published compute": theirs[0],
        "published waiting": theirs[1],
        "published agreement": theirs[2],
        "peak_in_flight": max(r.depth for r in runs),
        "peak_residual_bytes": max(r.peak_bytes for r in runs),
    }


def draw(rows: Sequence[dict[str, Any]]) -> figure.Figure:
    """Returns stacked bars."""
    drawn = figure.Figure(figsize=(8, 4.5))
    axes = drawn.subplots()
    names = [f"TP{each['tp']} {each['contender']}" for each in rows]
    left = [0.0] * len(rows)
    for part, colour in COLOURS.items():
        values = [each[f"{part}_s"] for each in rows]
        label = part.replace("_", ", ")
        bars = axes.barh(names, values, left=left, label=label, color=colour)
        left = [a + b for a, b in zip(left, values, strict=True)]
    added = [each["agreement_s"] for each in rows]
    labels = [f"agreement {1e3 * a:.0f} ms of it" if a else "" for a in added]
    axes.bar_label(bars, labels, padding=3, fontsize=7)
    axes.margins(x=0.2)
    axes.invert_yaxis()
    axes.set_xlabel("seconds of a step, mean of the ranks")
    axes.legend(fontsize=8)
    return drawn


def main() -> None:
    """Simulates and publishes."""
    parser = suite.arguments(__doc__, 5)
    parser.add_argument("--letter_ms", type=float, default=0.2)
    flags = parser.parse_args()
    config = workload_files.read(suite.CONFIGS / workload_files.WORKLOADS, VARIANT)
    jobs = [(tensor, name) for tensor in TENSORS for name in CONTENDERS]
    rows = []
    for tensor, name in suite.steps(jobs, "breakdown"):
        workload = Workload(config, tensor)
        seeds = range(flags.seeds)
        ran = [run(workload, name, seed, flags.letter_ms / 1e3) for seed in seeds]
        rows.append(line(tensor, name, ran))
    print(suite.table(rows))
    by_name = {(each["tp"], each["contender"]): each for each in rows}
    shares = {
        tensor: by_name[tensor, "BF"]["agreement_s"] / by_name[tensor, "BF"]["step_s"]
        for tensor in TENSORS[1:]
    }
    waits = {
        name: by_name[1, name]["step_s"] - by_name[1, name]["compute_s"]
        for name in ("1F1B", "BF")
    }
    result = (
        f"TP1: a rank waits {waits['1F1B']:.2f} s under blocking 1F1B, "
        f"{waits['BF']:.2f} s under BF (published 1.72, 0.77). Agreement adds "
        + ", ".join(f"{share:.2%} at TP{tensor}" for tensor, share in shares.items())
        + " (published 0.55 %, 0.77 %)"
    )
    about = suite.Figure(
        "time_breakdown",
        "Table 3, breakdown",
        "python scripts/bench/time_breakdown.py",
        f"`configs/bench/workloads.py:{VARIANT}`",
        flags.seeds,
        result,
    )
    figures = {f"agreement_share_tp{tensor}": share for tensor, share in shares.items()}
    suite.publish(flags, about, rows, draw(rows), figures)


if __name__ == "__main__":
    main()
