"""Tables of many runs: how long, how idle and why, how much memory, how far from ideal.

A row is one policy over several seeds. Speed-ups are paired: each seed's run is divided
into the baseline's run of the same seed, which faced the same delays, and only then is
the mean taken.
"""

import csv
import dataclasses
import io
import statistics
from collections.abc import Sequence

from rrfp_jax.observe import units
from rrfp_jax.sim.report import Report


@dataclasses.dataclass(frozen=True)
class Run:
    """One simulated or real step.

    Attributes:
      policy: its name.
      seed: of its delays.
      report: its figures.
      lower_bound_s: the makespan that no order can beat.
    """

    policy: str
    seed: int
    report: Report
    lower_bound_s: float


_HEADER = (
    "policy",
    "makespan ms",
    "speed-up",
    "std",
    "bubble",
    "fill+drain",
    "input",
    "transfer",
    "held",
    "in flight",
    "residuals",
    "bound",
)
_RESIDUALS = _HEADER.index("residuals")
_Row = tuple[str, ...]


def table(runs: Sequence[Run], baseline: str) -> str:
    """Returns an aligned table, a line a policy, in order of first appearance.

    `residuals` is the peak of the fullest rank; the column is there if any run knows.

    Args:
      runs: every policy with every seed.
      baseline: the policy that speed-ups are over.
    """
    rows: list[_Row] = [_HEADER]
    for policy in dict.fromkeys(run.policy for run in runs):
        rows.append(_row([run for run in runs if run.policy == policy], runs, baseline))
    if not any(_peak_bytes(runs)):
        rows = [row[:_RESIDUALS] + row[_RESIDUALS + 1 :] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def to_csv(runs: Sequence[Run], baseline: str) -> str:
    """Returns a CSV, a line a run; seconds, and idle time summed over ranks.

    `peak_bytes` is 0 where the residuals are not known.
    """
    text = io.StringIO()
    records = [_record(run, _speedup(run, runs, baseline)) for run in runs]
    writer = csv.DictWriter(text, list(records[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return text.getvalue()


def _record(run: Run, speedup: float) -> dict[str, str | float]:
    return {
        "policy": run.policy,
        "seed": run.seed,
        "makespan_s": run.report.makespan_s,
        "speedup": speedup,
        "bubble_fraction": run.report.bubble_fraction,
        **dataclasses.asdict(run.report.bubble),
        "peak_in_flight": max(run.report.peak_in_flight),
        "peak_bytes": max(run.report.peak_bytes),
        "lower_bound_s": run.lower_bound_s,
    }


def _row(mine: Sequence[Run], runs: Sequence[Run], baseline: str) -> _Row:
    speedups = [_speedup(run, runs, baseline) for run in mine]
    bubbles = [run.report.bubble for run in mine]
    total_s = sum(run.report.makespan_s * len(run.report.busy_s) for run in mine)
    causes_s = [
        sum(each)
        for each in zip(*(dataclasses.astuple(b) for b in bubbles), strict=True)
    ]
    bounds = [run.report.makespan_s / run.lower_bound_s for run in mine]
    return (
        mine[0].policy,
        f"{statistics.fmean(run.report.makespan_s for run in mine) * 1e3:.1f}",
        f"{statistics.fmean(speedups):.3f}",
        f"{statistics.stdev(speedups):.3f}" if len(speedups) > 1 else "-",
        f"{sum(causes_s) / total_s:.1%}",
        *(f"{cause_s / total_s:.1%}" for cause_s in causes_s),
        str(max(max(run.report.peak_in_flight) for run in mine)),
        units.bytes_in_words(peak) if (peak := max(_peak_bytes(mine))) else "-",
        f"{statistics.fmean(bounds):.3f}",
    )


def _peak_bytes(runs: Sequence[Run]) -> list[int]:
    """Returns the residuals of the fullest rank of each run; 0 where not known."""
    return [max(run.report.peak_bytes) for run in runs]


def _speedup(run: Run, runs: Sequence[Run], baseline: str) -> float:
    against = next(r for r in runs if r.policy == baseline and r.seed == run.seed)
    return against.report.makespan_s / run.report.makespan_s
