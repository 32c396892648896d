"""What the paper lacks: late links, one slow rank, and every control beside, simulated.

    python scripts/bench/adversity.py [--seeds=5] [--json FILE] [--out=docs/bench]

Qwen3-4B + ViT-Big on 16 ranks, a batch of 96. Conditions: the workload as it is; its
transfers with a CV of 0, 1, 5 and 20 (the largest spread that RRFP §2 measured is a CV
of about 21); one rank of the language model 1.5, 2 and 3 times
as slow throughout; injected jitter J3.

Contenders: fixed 1F1B, its transfers blocking or overlapped; fixed 1F1B as deep as BF,
overlapped; ZB-H1; Varuna's order; BF and BFW with 32 in flight; and, with no more
residual bytes on any rank than fixed 1F1B's fullest, BFW, and `bfw_memory` on a V.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import suite
from matplotlib import figure
from suite import Contender, Ran

from rrfp_jax import workload_files
from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.workloads.stage_times import Workload

RANKS, BATCH, VARIANT = 16, 96, "qwen3_4b_vit_big"
SLOW_RANK = 12
BLOCKED, FREE, SMALL = "1F1B, blocking", "1F1B, overlapped", "BFW at 1F1B's memory"
ON_A_V = "BFW memory on a V, at 1F1B's memory"
HELD = {  # the contenders whose depth and memory are their own
    BLOCKED: suite.fixed("1f1b", True),
    FREE: suite.fixed("1f1b", False),
    "1F1B as deep as BF, overlapped": suite.as_deep(suite.LIMIT, RANKS, False),
    "ZB-H1, overlapped": suite.fixed("zb_h1", False),
    "Varuna, overlapped": suite.varuna(),
    "BF": suite.readiness("bf"),
    "BFW": suite.readiness("bfw"),
}


def conditions(workload: Workload) -> dict[str, Workload]:
    """Returns the workload under each condition."""

    def transfers(cv: float) -> Workload:
        varies = dataclasses.replace(workload.config.variation, transfer_cv=cv)
        config = dataclasses.replace(workload.config, variation=varies)
        return dataclasses.replace(workload, config=config)

    def slow(factor: float) -> Workload:
        return dataclasses.replace(workload, straggler=(SLOW_RANK, factor))

    found = {"as it is": workload}
    found |= {f"transfers, CV {cv}": transfers(cv) for cv in (0, 1, 5, 20)}
    found |= {f"a rank {factor}x as slow": slow(factor) for factor in (1.5, 2, 3)}
    found["jitter J3"] = dataclasses.replace(workload, level="J3")
    return found


def run(workload: Workload, seeds: int) -> tuple[dict[str, Contender], Any]:
    """Runs everyone under one condition; the limits in bytes are 1F1B's peak there."""
    plain = suite.chain(RANKS, BATCH)
    on_a_v = graphs.chain(BATCH, placement.v_shaped(RANKS))

    def ran(contender: Contender, graph: PipelineGraph) -> list[Ran]:
        return [suite.simulate(workload, contender, graph, k) for k in range(seeds)]

    found = {name: ran(contender, plain) for name, contender in HELD.items()}
    peak = max(each.peak_bytes for each in found[BLOCKED])
    small = {
        SMALL: suite.within(HELD["BFW"], peak),
        ON_A_V: suite.within(
            suite.readiness("bfw_memory", 7 * RANKS // 4, in_flight_taper=0.5), peak
        ),
    }
    found[SMALL] = ran(small[SMALL], plain)
    found[ON_A_V] = ran(small[ON_A_V], on_a_v)
    return HELD | small, found


def draw(found: Mapping[str, Mapping[str, Sequence[Ran]]], over: str) -> figure.Figure:
    """Returns the speed-ups over a baseline, a group of bars for each condition."""
    drawn = figure.Figure(figsize=(12, 5))
    axes = drawn.subplots()
    names = [name for name in next(iter(found.values())) if name != over]
    width = 0.8 / len(names)
    for k, name in enumerate(names):
        values = [suite.paired(runs[over], runs[name]) for runs in found.values()]
        places = [i + k * width for i in range(len(found))]
        axes.bar(places, values, width * 0.95, label=name)
    labels = [
        name.replace(", ", ",\n").replace(" as slow", "\nas slow") for name in found
    ]
    axes.set_xticks([i + 0.35 for i in range(len(found))], labels, fontsize=8)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel(f"speed-up over {over}")
    axes.margins(y=0.25)  # room for the legend
    axes.legend(fontsize=7, ncols=3, loc="upper right")
    return drawn


def main() -> None:
    """Simulates and publishes."""
    flags = suite.arguments(__doc__, 5).parse_args()
    config = workload_files.read(suite.CONFIGS / workload_files.WORKLOADS, VARIANT)
    found: dict[str, dict[str, list[Ran]]] = {}
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    for condition, workload in suite.steps(
        conditions(Workload(config)).items(), "conditions"
    ):
        contenders, runs = run(workload, flags.seeds)
        found[condition] = runs
        for name, each in runs.items():
            row = suite.row(name, contenders[name], each, condition=condition)
            for over in (BLOCKED, FREE):
                speedup = suite.paired(runs[over], each)
                row[f"over {over}"] = round(speedup, 3)
                figures[f"{condition}, {name} over {over}"] = speedup
            rows.append(row)
    print(suite.table(rows))
    parts = []
    for condition, runs in found.items():
        over = {name: suite.paired(runs[FREE], each) for name, each in runs.items()}
        parts.append(
            f"{condition}: {over['BFW']:.2f}, at its memory "
            f"{max(over[SMALL], over[ON_A_V]):.2f}, Varuna "
            f"{over['Varuna, overlapped']:.2f}"
        )
    about = suite.Figure(
        "adversity",
        "Late links, a slow rank, every control",
        "python scripts/bench/adversity.py",
        f"`configs/bench/workloads.py:{VARIANT}`",
        flags.seeds,
        "BFW over overlapped 1F1B. " + "; ".join(parts),
    )
    suite.publish(flags, about, rows, draw(found, FREE), figures)


if __name__ == "__main__":
    main()
