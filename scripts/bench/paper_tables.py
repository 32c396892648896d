"""The paper's Tables 1 and 2, simulated at their true size.

    python scripts/bench/paper_tables.py [--seeds=5] [--json FILE] [--out=docs/bench]

Twenty rows: six workloads, each spread over GPUs in several ways. Durations come from
`configs/bench/workloads.py`: one cost model for all rows, fitted to the published times
of 1F1B and ZB alone. With replicas, a step is its slowest replica's.

Baselines: fixed 1F1B and ZB-H1 with transfers that block both ranks, as in the paper;
1F1B with overlapped ones; 1F1B as deep as BF; Varuna's order. Ours: BF and BFW, at most
32 microbatches in flight on a rank (RRFP §8) or as many as ranks where that is more,
since fixed 1F1B then holds as many too; and BFW with no more residual bytes on any rank
than fixed 1F1B has on its fullest.
"""

import csv
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import suite
from matplotlib import figure
from suite import Contender, Ran

from rrfp_jax import workload_files
from rrfp_jax.workloads.config import Row, WorkloadConfig
from rrfp_jax.workloads.stage_times import Workload

PUBLISHED = suite.ROOT / "docs/paper_tables.csv"
F1B, ZB, F1B_FREE, DEEP = "1F1B", "ZB", "1F1B, overlapped", "1F1B, as deep as BF"
VARUNA, BF, BFW, SMALL = "Varuna", "BF", "BFW", "BFW at 1F1B's memory"
COLUMNS = {F1B: "f1b_s", ZB: "zb_s", BF: "rrfp_bf_s", BFW: "rrfp_bfw_s"}


def contenders(row: Row) -> dict[str, Contender]:
    """Returns who runs a row."""
    limit = max(suite.LIMIT, row.ranks)
    deep = suite.as_deep(min(limit, row.num_microbatches), row.ranks, False)
    return {
        F1B: suite.fixed("1f1b", True),
        ZB: suite.fixed("zb_h1", True),
        F1B_FREE: suite.fixed("1f1b", False),
        DEEP: deep,
        VARUNA: suite.varuna(limit),
        BF: suite.readiness("bf", limit),
        BFW: suite.readiness("bfw", limit),
    }


def run(workload: Workload, row: Row, contender: Contender, seed: int) -> Ran:
    """Simulates a step: its slowest replica."""
    graph = suite.chain(row.ranks, row.num_microbatches)
    replicas = [
        suite.simulate(workload, contender, graph, seed * row.replicas + replica)
        for replica in range(row.replicas)
    ]
    return max(replicas, key=lambda ran: ran.makespan_s)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """All runs of a row, and what the paper has for it."""

    config: WorkloadConfig
    row: Row
    runs: Mapping[str, Sequence[Ran]]
    published_s: Mapping[str, float]

    def __str__(self) -> str:
        row = self.row
        return f"{self.config.name} TP{row.tensor} PP{row.ranks} DP{row.replicas}"

    def speedup(self, over: str, of: str) -> float:
        """Returns our simulated speed-up."""
        return suite.paired(self.runs[over], self.runs[of])

    def published(self, over: str, of: str) -> float:
        """Returns the paper's."""
        return self.published_s[over] / self.published_s[of]


def outcome(config: WorkloadConfig, row: Row, seeds: int, published: Any) -> Outcome:
    """Runs a row."""
    workload = Workload(config, row.tensor)
    found = {
        name: [run(workload, row, contender, seed) for seed in range(seeds)]
        for name, contender in contenders(row).items()
    }
    peak = max(ran.peak_bytes for ran in found[F1B])
    limit = max(suite.LIMIT, row.ranks)
    small = suite.within(suite.readiness("bfw", limit), peak)
    found[SMALL] = [run(workload, row, small, seed) for seed in range(seeds)]
    return Outcome(config, row, found, published)


def read_published() -> dict[tuple[str, int, int, int], dict[str, float]]:
    """Returns the paper's seconds by (workload, tensor, ranks, replicas)."""
    with PUBLISHED.open() as file:
        return {
            (line["workload"], int(line["tp"]), int(line["pp"]), int(line["dp"])): {
                name: float(line[column]) for name, column in COLUMNS.items()
            }
            for line in csv.DictReader(file)
        }


def rows_of(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns the CSV: a line for each contender of each row."""
    rows = []
    for each in outcomes:
        row = each.row
        where = {"table": row.table, "workload": each.config.name}
        where |= {"tp": row.tensor, "pp": row.ranks, "dp": row.replicas}
        known = contenders(row)
        known[SMALL] = known[BFW]
        for name, runs in each.runs.items():
            line = suite.row(name, known[name], runs, **where)
            line["speed-up over 1F1B"] = round(each.speedup(F1B, name), 3)
            line["published_s"] = each.published_s.get(name, "")
            line["published speed-up"] = (
                round(each.published(F1B, name), 3) if name in each.published_s else ""
            )
            rows.append(line)
    return rows


def draw(outcomes: Sequence[Outcome]) -> figure.Figure:
    """Returns the speed-ups of BFW over 1F1B, ours beside the paper's."""
    drawn = figure.Figure(figsize=(9, 8))
    axes = drawn.subplots()
    places = range(len(outcomes))
    series = (
        ("BFW over 1F1B, published", [o.published(F1B, BFW) for o in outcomes], "#999"),
        ("simulated", [o.speedup(F1B, BFW) for o in outcomes], "#0072b2"),
        (
            "simulated, 1F1B overlapped",
            [o.speedup(F1B_FREE, BFW) for o in outcomes],
            "#56b4e9",
        ),
        (
            "simulated, at 1F1B's memory",
            [o.speedup(F1B, SMALL) for o in outcomes],
            "#e69f00",
        ),
    )
    for k, (label, values, colour) in enumerate(series):
        axes.barh(
            [p + 0.2 * k for p in places], values, 0.19, label=label, color=colour
        )
    axes.set_yticks([p + 0.3 for p in places], [str(o) for o in outcomes], fontsize=8)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.invert_yaxis()
    axes.set_xlabel("speed-up")
    axes.legend(loc="lower right", fontsize=8)
    return drawn


def main() -> None:
    """Simulates and publishes."""
    flags = suite.arguments(__doc__, 5).parse_args()
    published = read_published()
    path = suite.CONFIGS / "workloads.py"
    loaded = workload_files.read_all(path)
    jobs = [(config, row) for config in loaded for row in config.runs]
    outcomes = [
        outcome(
            config,
            row,
            flags.seeds,
            published[config.name, row.tensor, row.ranks, row.replicas],
        )
        for config, row in suite.steps(jobs, "rows")
    ]
    rows = rows_of(outcomes)
    hidden = ("table", "std_s", "fill_drain", "input", "held", "transfer")
    print(suite.table([{k: v for k, v in r.items() if k not in hidden} for r in rows]))
    ahead = {
        (of, over): sum(o.speedup(over, of) > 1 for o in outcomes)
        for of in (BF, BFW)
        for over in (F1B, ZB)
    }
    means = {
        name: statistics.geometric_mean([o.speedup(F1B, name) for o in outcomes])
        for name in (ZB, F1B_FREE, DEEP, VARUNA, BF, BFW, SMALL)
    }
    theirs = {
        n: statistics.geometric_mean([o.published(F1B, n) for o in outcomes])
        for n in (BF, BFW)
    }
    result = (
        f"{len(outcomes)} rows; BFW ahead of 1F1B in {ahead[BFW, F1B]} and of ZB in "
        f"{ahead[BFW, ZB]}, BF in {ahead[BF, F1B]} and {ahead[BF, ZB]}. Geometric "
        f"means over blocking 1F1B: BF {means[BF]:.2f} (published {theirs[BF]:.2f}), "
        f"BFW {means[BFW]:.2f} ({theirs[BFW]:.2f}), BFW at 1F1B's memory "
        f"{means[SMALL]:.2f}; controls: 1F1B overlapped {means[F1B_FREE]:.2f}, as "
        f"deep {means[DEEP]:.2f}, Varuna {means[VARUNA]:.2f}"
    )
    about = suite.Figure(
        "paper_tables",
        "Tables 1 and 2, simulated",
        "python scripts/bench/paper_tables.py",
        "`configs/bench/workloads.py`, all variants",
        flags.seeds,
        result,
    )
    figures: dict[str, Any] = {
        "rows": len(outcomes),
        "rows_ahead_of_1f1b": ahead[BFW, F1B],
        "rows_ahead_of_zb": ahead[BFW, ZB],
        "rows_bf_ahead_of_1f1b": ahead[BF, F1B],
        "rows_bf_ahead_of_zb": ahead[BF, ZB],
    }
    figures |= {f"geomean over 1F1B, {name}": mean for name, mean in means.items()}
    suite.publish(flags, about, rows, draw(outcomes), figures)


if __name__ == "__main__":
    main()
