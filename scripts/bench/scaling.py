"""The paper's Table 8: how the gain grows with ranks, towers and batches, simulated.

    python scripts/bench/scaling.py [--seeds=5] [--json FILE] [--out=docs/bench]

Five series (RRFP §7.8), each over fixed 1F1B with blocking transfers and beside it over
overlapped ones: pipeline ranks for three workloads, vision towers of growing size with
Qwen3-1.7B and LLaMA3-8B, and the batch. For which workloads the two series of batches
are was not to be found; taken: Qwen3-1.7B + ViT-H and LLaMA3-8B + ViT-5B, at the ranks
of the towers' series.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import suite
from matplotlib import figure
from suite import Ran

from rrfp_jax import workload_files
from rrfp_jax.workloads.stage_times import Workload


@dataclasses.dataclass(frozen=True)
class Point:
    """A pipeline and the paper's speed-up there."""

    series: str
    x: str
    variant: str
    tensor: int
    ranks: int
    batch: int
    published: float


def _points() -> list[Point]:
    found: list[Point] = []

    def add(series: str, xs: Sequence[str], settings: Any, published: Any) -> None:
        for x, setting, speedup in zip(xs, settings, published, strict=True):
            found.append(Point(series, x, *setting, speedup))

    qwen, llama, four = "qwen3_1_7b_vit_h", "llama3_8b_vit_5b", "qwen3_4b_vit_big"
    ranks = (4, 8, 16)
    add(
        "ranks, Qwen3-1.7B + ViT-H",
        [f"PP{p}" for p in ranks],
        [(qwen, 1, p, 192) for p in ranks],
        (1.07, 1.94, 2.01),
    )
    add(
        "ranks, LLaMA3-8B + ViT-5B",
        [f"PP{2 * p}" for p in ranks],
        [(llama, 1, 2 * p, 64) for p in ranks],
        (1.79, 2.13, 2.31),
    )
    add(
        "ranks, Qwen3-4B + ViT-Big, TP2",
        [f"PP{p}" for p in ranks],
        [(four, 2, p, 64) for p in ranks],
        (1.03, 1.64, 1.72),
    )
    add(
        "towers, Qwen3-1.7B, PP16",
        ("L", "H", "g", "Big"),
        [(f"qwen3_1_7b_vit_{v}", 1, 16, 192) for v in ("l", "h", "g", "big")],
        (1.73, 1.89, 2.04, 2.16),
    )
    add(
        "towers, LLaMA3-8B, PP32",
        ("5B", "Intern", "22B"),
        [(f"llama3_8b_{v}", 1, 32, 64) for v in ("vit_5b", "internvit", "vit_22b")],
        (1.32, 1.43, 1.78),
    )
    batches = (64, 128, 192)
    add(
        "batch, Qwen3-1.7B + ViT-H, PP16",
        [str(b) for b in batches],
        [(qwen, 1, 16, b) for b in batches],
        (1.98, 2.14, 2.18),
    )
    add(
        "batch, LLaMA3-8B + ViT-5B, PP32",
        [str(b) for b in batches],
        [(llama, 1, 32, b) for b in batches],
        (2.62, 2.72, 2.82),
    )
    return found


POINTS = _points()
CONTENDERS = {
    "1F1B": suite.fixed("1f1b", True),
    "1F1B, overlapped": suite.fixed("1f1b", False),
    "BF": suite.readiness("bf"),
    "BFW": suite.readiness("bfw"),
}
LINES = {
    "BF over blocking 1F1B": ("1F1B", "BF", "-o"),
    "BFW over blocking 1F1B": ("1F1B", "BFW", "-s"),
    "BFW over overlapped 1F1B": ("1F1B, overlapped", "BFW", "--^"),
}


def run(point: Point, seeds: int) -> dict[str, list[Ran]]:
    """Simulates all contenders at a point."""
    path = suite.CONFIGS / workload_files.WORKLOADS
    workload = Workload(workload_files.read(path, point.variant), point.tensor)
    graph = suite.chain(point.ranks, point.batch)
    return {
        name: [
            suite.simulate(workload, contender, graph, seed) for seed in range(seeds)
        ]
        for name, contender in CONTENDERS.items()
    }


def draw(found: dict[Point, dict[str, list[Ran]]]) -> figure.Figure:
    """Returns a panel for each series."""
    drawn = figure.Figure(figsize=(12, 6.5))
    names = list(dict.fromkeys(point.series for point in found))
    panels = drawn.subplots(2, 4).flat
    for axes, series in zip(panels, names, strict=False):
        points = [point for point in found if point.series == series]
        xs = [point.x for point in points]
        for label, (over, of, style) in LINES.items():
            ys = [suite.paired(found[p][over], found[p][of]) for p in points]
            axes.plot(xs, ys, style, label=label, markersize=4)
        axes.plot(
            xs, [p.published for p in points], ":x", color="#666", label="published"
        )
        axes.set_title(series, fontsize=8)
        axes.set_ylim(bottom=0.8)
    last = drawn.axes[-1]
    last.axis("off")
    last.legend(*drawn.axes[0].get_legend_handles_labels(), loc="center", fontsize=8)
    drawn.tight_layout()
    return drawn


def main() -> None:
    """Simulates and publishes."""
    flags = suite.arguments(__doc__, 5).parse_args()
    found = {point: run(point, flags.seeds) for point in suite.steps(POINTS, "scaling")}
    rows: list[dict[str, Any]] = []
    for point, runs in found.items():
        for name, each in runs.items():
            row = suite.row(
                name, CONTENDERS[name], each, series=point.series, x=point.x
            )
            row["speed-up over 1F1B"] = round(suite.paired(runs["1F1B"], each), 3)
            row["published"] = point.published if name == "BF" else ""
            rows.append(row)
    shown = ("series", "x", "contender", "makespan_s", "peak_in_flight")
    shown += ("peak_residual_bytes", "speed-up over 1F1B", "published")
    print(suite.table([{name: row[name] for name in shown} for row in rows]))
    parts = []
    for series in dict.fromkeys(point.series for point in found):
        points = [point for point in found if point.series == series]
        ours = "/".join(
            f"{suite.paired(found[p]['1F1B'], found[p]['BFW']):.2f}" for p in points
        )
        theirs = "/".join(f"{p.published:.2f}" for p in points)
        parts.append(f"{series}: {ours} ({theirs})")
    about = suite.Figure(
        "scaling",
        "Table 8, scaling",
        "python scripts/bench/scaling.py",
        "`configs/bench/workloads.py`",
        flags.seeds,
        "BFW over blocking 1F1B (published): " + "; ".join(parts),
    )
    figures = {
        f"{p.series}, {p.x}": suite.paired(runs["1F1B"], runs["BFW"])
        for p, runs in found.items()
    }
    suite.publish(flags, about, rows, draw(found), figures)


if __name__ == "__main__":
    main()
