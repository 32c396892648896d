"""What the figures of docs/benchmarks.md have in common.

A contender is a policy and whether its transfers block; a field runs contenders on the
steps of a workload, in virtual time or on emulated devices. All contenders of a seed
face the same delays. `publish` writes a figure's CSV and picture, and its row.
"""

import argparse
import csv
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tqdm
from matplotlib import figure

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import memory, placement
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.observe import units
from rrfp_jax.sim import report, simulator
from rrfp_jax.sim.report import Report
from rrfp_jax.workloads.stage_times import Workload

ROOT = pathlib.Path(__file__).parents[2]
CONFIGS = ROOT / "configs/bench"
LIMIT = 32  # microbatches in flight on a rank, as everywhere in the paper (RRFP §8)
# Emulated and simulated devices start a queued task at once: to commit early gains
# nothing there, and costs knowledge.
LAUNCH_AHEAD = 1


@dataclasses.dataclass(frozen=True)
class Contender:
    """A policy, and whether its transfers occupy both ranks."""

    policy: Policy
    blocking: bool = False

    @property
    def transfers(self) -> str:
        """What its transfers do, in a word."""
        return "blocking" if self.blocking else "overlapped"


def readiness(hint: str, limit: int = LIMIT, **settings: Any) -> Contender:
    """Returns a readiness-first contender."""
    policy = Policy(hint, in_flight_limit=limit, launch_ahead=LAUNCH_AHEAD, **settings)
    return Contender(policy)


def fixed(hint: str, blocking: bool, warmup_factor: float = 1.0) -> Contender:
    """Returns a fixed order; it brings its own depth."""
    policy = Policy(
        hint,
        "fixed",
        in_flight_limit=2**20,
        warmup_factor=warmup_factor,
        launch_ahead=LAUNCH_AHEAD,
    )
    return Contender(policy, blocking)


def varuna(limit: int = LIMIT, blocking: bool = False) -> Contender:
    """Returns Varuna's order: 1F1B that pulls forwards ahead of late gradients."""
    policy = Policy(
        "1f1b", "opportunistic", in_flight_limit=limit, launch_ahead=LAUNCH_AHEAD
    )
    return Contender(policy, blocking)


def as_deep(depth: int, num_ranks: int, blocking: bool) -> Contender:
    """Returns the fixed 1F1B whose first rank holds `depth` microbatches."""
    return fixed("deep_1f1b", blocking, max(1.0, depth / num_ranks))


def within(contender: Contender, peak_bytes: int) -> Contender:
    """Returns the contender with no more residuals on any rank."""
    limit_gb = peak_bytes / memory.GIB
    policy = dataclasses.replace(contender.policy, memory_limit_gb=limit_gb)
    return dataclasses.replace(contender, policy=policy)


@dataclasses.dataclass(frozen=True)
class Ran:
    """A step: when the host knew of its end, and its figures."""

    makespan_s: float
    report: Report

    @property
    def depth(self) -> int:
        """The most microbatches in flight on a rank."""
        return max(self.report.peak_in_flight)

    @property
    def peak_bytes(self) -> int:
        """The most residuals on a rank."""
        return max(self.report.peak_bytes)


def chain(num_ranks: int, num_microbatches: int) -> PipelineGraph:
    """Returns a pipeline of one stage a rank."""
    return graphs.chain(num_microbatches, placement.one_each(num_ranks))


def simulate(
    workload: Workload, contender: Contender, graph: PipelineGraph, seed: int
) -> Ran:
    """Runs a step in virtual time."""
    split = contender.policy.applied_to(graph)
    trace = simulator.simulate(
        split,
        contender.policy,
        workload.draw(split, seed),
        contender.blocking,
        workload.residuals(split),
    )
    return Ran(trace.makespan_s, report.report(trace, contender.blocking))


def paired(over: Sequence[Ran], of: Sequence[Ran]) -> float:
    """Returns the mean of the speed-ups, seed by seed."""
    pairs = zip(over, of, strict=True)
    return statistics.fmean(a.makespan_s / b.makespan_s for a, b in pairs)


def mean_s(runs: Sequence[Ran]) -> float:
    """Returns the mean makespan."""
    return statistics.fmean(run.makespan_s for run in runs)


def row(name: str, contender: Contender, runs: Sequence[Ran], **more: Any) -> Any:
    """Returns a contender's line of a CSV: time, depth, memory, causes of idleness."""
    ranks = len(runs[0].report.busy_s)
    all_s = sum(run.report.makespan_s for run in runs) * ranks
    causes = [dataclasses.asdict(run.report.bubble) for run in runs]
    shares = {
        cause.removesuffix("_s"): round(sum(each[cause] for each in causes) / all_s, 4)
        for cause in causes[0]
    }
    return {
        **more,
        "contender": name,
        "transfers": contender.transfers,
        "makespan_s": round(mean_s(runs), 4),
        "std_s": round(statistics.stdev(r.makespan_s for r in runs), 4)
        if len(runs) > 1
        else 0.0,
        "peak_in_flight": max(run.depth for run in runs),
        "peak_residual_bytes": max(run.peak_bytes for run in runs),
        **shares,
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as aligned text; bytes in words, shares in per cent."""
    header = list(rows[0])
    lines = [[_cell(name, each[name]) for name in header] for each in rows]
    names = [name.removesuffix("_bytes").replace("_", " ") for name in header]
    widths = [max(map(len, column)) for column in zip(names, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True))
        for line in [names, *lines]
    )


def _cell(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return units.bytes_in_words(value) if value else "-"
    if name in ("fill_drain", "input", "transfer", "held"):
        return f"{value:.1%}"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def arguments(doc: str | None, seeds: int) -> argparse.ArgumentParser:
    """Returns the flags that all figures have."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=seeds, help="paired, from 0 on")
    parser.add_argument("--json", type=pathlib.Path, help="one flat object")
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        help="a folder for CSV and PNG; docs/bench: and a row in docs/benchmarks.md",
    )
    return parser


def steps(items: Iterable[Any], what: str) -> Any:
    """Returns the items, with a progress bar on a terminal."""
    return tqdm.tqdm(list(items), what, leave=False, disable=None)


@dataclasses.dataclass(frozen=True)
class Figure:
    """What a script publishes.

    Attributes:
      name: of its files, and of its row.
      title: of its row.
      command: that makes it.
      config: what it runs.
      seeds: how many.
      result: in a sentence.
    """

    name: str
    title: str
    command: str
    config: str
    seeds: int
    result: str


def publish(
    flags: argparse.Namespace,
    about: Figure,
    rows: Sequence[Mapping[str, Any]],
    picture: figure.Figure,
    figures: Mapping[str, Any],
) -> None:
    """Writes what the flags ask for.

    Args:
      flags: parsed from `arguments`.
      about: the figure.
      rows: of its CSV.
      picture: of it.
      figures: of its JSON.
    """
    print(about.result)
    if flags.json:
        flags.json.write_text(json.dumps(dict(figures), indent=2) + "\n")
    if flags.out is None:
        return
    flags.out.mkdir(parents=True, exist_ok=True)
    with (flags.out / f"{about.name}.csv").open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    picture.savefig(flags.out / f"{about.name}.png", dpi=120, bbox_inches="tight")
    record(flags.out, about)


_HEAD = """# Benchmarks

Each row is one command; it writes the CSV and the picture, and this row. Figures are
ratios within one run. [method.md](method.md) says what the controls are for,
[scripts/bench/README.md](../scripts/bench/README.md) has the bars of the parts.

| figure | result | config | seeds | machine | commit, day |
|---|---|---|---|---|---|
"""


def record(folder: pathlib.Path, about: Figure) -> None:
    """Writes the row of a figure, if its files are in docs/bench."""
    if folder.resolve() != ROOT / "docs/bench":
        return
    path = ROOT / "docs/benchmarks.md"
    lines = path.read_text().splitlines() if path.exists() else []
    old = [line for line in lines if line.startswith("| [")]
    files = f"[{about.title}](bench/{about.name}.png) ([CSV](bench/{about.name}.csv))"
    line = (
        f"| {files} `{about.command}` | {about.result} | {about.config} "
        f"| {about.seeds} | {machine()} | {_commit()}, {datetime.date.today()} |"
    )
    kept = [each for each in old if f"(bench/{about.name}.csv)" not in each]
    path.write_text(_HEAD + "\n".join(sorted([*kept, line])) + "\n")


def machine() -> str:
    """Returns what this machine is, in a few words."""
    python = f"Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {platform.machine()}, {python}, CPU only"


def _commit() -> str:
    def git(*words: str) -> str:
        ran = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
        return ran.stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", "rrfp_jax")
    return (git("rev-parse", "--short", "HEAD") or "none") + ("+" if changed else "")
