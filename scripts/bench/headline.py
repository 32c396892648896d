"""BFW over fixed 1F1B in the runtime, on 16 emulated ranks, with honest controls.

    python scripts/bench/headline.py [--seeds=5] [--json FILE] [--out=docs/bench]

The real runtime on emulated devices. Durations, transfers and residuals come from
`configs/bench/emulated_language.py` and `emulated_multimodal.py`; the seeds are paired.
BFW holds at most 32 microbatches in flight on a rank and its transfers overlap with
compute. The baseline's transfers block both ranks, as in the paper (`blocking`, and
`language_bfw`), or overlap like ours (`overlapped`).

Beside each speed-up stand two more: over the fixed 1F1B whose first rank holds as many
microbatches as BFW's fullest (`equal_depth`), and of a BFW that keeps no more residual
bytes on any rank than fixed 1F1B on its fullest (`equal_memory`).
"""

from typing import Any

import jax

NUM_RANKS = 16
jax.config.update("jax_num_cpu_devices", NUM_RANKS)  # before the first use

import suite
from emulation import Field
from matplotlib import figure
from suite import Contender, Ran

from rrfp_jax import workload_files

BLOCKED, FREE = "1F1B, blocking", "1F1B, overlapped"
DEEP_BLOCKED, DEEP_FREE = "1F1B as deep, blocking", "1F1B as deep, overlapped"
BFW, SMALL = "BFW", "BFW at 1F1B's memory"
FIGURES = {  # name -> over, of
    "bfw_blocking": (BLOCKED, BFW),
    "bfw_overlapped": (FREE, BFW),
    "bfw_blocking_equal_depth": (DEEP_BLOCKED, BFW),
    "bfw_overlapped_equal_depth": (DEEP_FREE, BFW),
    "bfw_blocking_equal_memory": (BLOCKED, SMALL),
    "bfw_overlapped_equal_memory": (FREE, SMALL),
}


def measure(kind: str, seeds: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Runs all contenders on all seeds.

    Args:
      kind: language or multimodal.
      seeds: how many.

    Returns:
      A line for each contender, and the speed-ups.
    """
    path = suite.CONFIGS / f"emulated_{kind}.py"
    config, workload = workload_files.emulated(path)
    field = Field(workload, NUM_RANKS, config.num_microbatches)
    contenders = {
        BLOCKED: suite.fixed("1f1b", True),
        FREE: suite.fixed("1f1b", False),
        "ZB-H1, blocking": suite.fixed("zb_h1", True),
        "ZB-H1, overlapped": suite.fixed("zb_h1", False),
        "Varuna, overlapped": suite.varuna(),
        "BF": suite.readiness("bf"),
        BFW: suite.readiness("bfw"),
    }
    graph = suite.chain(NUM_RANKS, config.num_microbatches)
    # Depth and memory of the baseline are known beforehand, those of BFW nearly.
    peak = suite.simulate(workload, contenders[BLOCKED], graph, 0).peak_bytes
    contenders[SMALL] = suite.within(contenders[BFW], peak)
    depth = suite.simulate(workload, contenders[BFW], graph, 0).depth
    contenders[DEEP_BLOCKED] = suite.as_deep(depth, NUM_RANKS, True)
    contenders[DEEP_FREE] = suite.as_deep(depth, NUM_RANKS, False)
    found: dict[str, list[Ran]] = {name: [] for name in contenders}
    jobs = [(seed, name) for seed in range(seeds) for name in contenders]
    for seed, name in suite.steps(jobs, kind):
        found[name].append(field.run(contenders[name], seed))
    speedups = {
        f"{kind}_{name}": suite.paired(found[over], found[of])
        for name, (over, of) in FIGURES.items()
    }
    return rows(kind, contenders, found), speedups


def rows(
    kind: str, contenders: dict[str, Contender], found: dict[str, list[Ran]]
) -> list[dict[str, Any]]:
    """Returns a line for each contender."""
    return [
        suite.row(name, contenders[name], runs, workload=kind)
        | {"BFW over it": round(suite.paired(runs, found[BFW]), 3)}
        for name, runs in found.items()
    ]


def draw(rows: list[dict[str, Any]]) -> figure.Figure:
    """Returns the mean step of each contender, and what it holds."""
    drawn = figure.Figure(figsize=(9, 6))
    for axes, kind in zip(
        drawn.subplots(2, 1), ("language", "multimodal"), strict=True
    ):
        mine = [each for each in rows if each["workload"] == kind]
        ours = ["BF" in each["contender"] for each in mine]
        colours = ["#0072b2" if is_ours else "#999999" for is_ours in ours]
        names = [each["contender"] for each in mine]
        bars = axes.barh(names, [each["makespan_s"] for each in mine], color=colours)
        labels = [
            f"{each['BFW over it']:.2f}x, {each['peak_in_flight']} in flight"
            for each in mine
        ]
        axes.bar_label(bars, labels, padding=3, fontsize=8)
        axes.margins(x=0.25)
        axes.invert_yaxis()
        axes.set_title(f"{kind}: seconds a step (time over BFW's, peak in flight)")
    drawn.tight_layout()
    return drawn


def main() -> None:
    """Measures and publishes."""
    flags = suite.arguments(__doc__, 5).parse_args()
    lines: list[dict[str, Any]] = []
    figures: dict[str, float] = {}
    for kind in ("language", "multimodal"):
        more, speedups = measure(kind, flags.seeds)
        lines += more
        figures |= speedups
    figures["language_bfw"] = figures["language_bfw_blocking"]
    for twin in ("equal_depth", "equal_memory"):
        figures[f"language_bfw_{twin}"] = figures[f"language_bfw_blocking_{twin}"]
    print(suite.table(lines))
    parts = [
        f"{kind} {figures[f'{kind}_bfw_{how}']:.2f} over 1F1B with {how} transfers "
        f"(as deep {figures[f'{kind}_bfw_{how}_equal_depth']:.2f}, at 1F1B's memory "
        f"{figures[f'{kind}_bfw_{how}_equal_memory']:.2f})"
        for kind in ("language", "multimodal")
        for how in ("blocking", "overlapped")
    ]
    about = suite.Figure(
        "headline",
        "BFW over 1F1B, emulated",
        "python scripts/bench/headline.py",
        "`configs/bench/emulated_{language,multimodal}.py`",
        flags.seeds,
        "; ".join(parts),
    )
    suite.publish(flags, about, lines, draw(lines), figures)


if __name__ == "__main__":
    main()
