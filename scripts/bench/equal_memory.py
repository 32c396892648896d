"""What readiness gains at the memory of 1F1B, over a grid of pipelines and jitters.

    python scripts/bench/equal_memory.py [--out=DIR] [--seeds=20] [--first_seed=0]
        [--launch_ahead=1]

Simulated: P in {4, 8, 16} ranks, M in {2P, 4P, 8P} microbatches, F = B = W a rank and
microbatch, transfers of {0, 0.1, 0.3} F, lognormal with CV in {0, 0.3, 0.6, 1} on every
task and every transfer. No rank may keep more residual bytes than fixed 1F1B's first
one, P microbatches; a W keeps 32/34 of what an F does. A fixed 1F1B runs whole
backwards, as long as B and W of the same draws. On a V each of a rank's two stages is
half as long and keeps half, with draws of its own.

Prints every cell, and the figures of the bars; writes cells.csv and cells.png to DIR.
"""

import argparse
import csv
import dataclasses
import itertools
import math
import multiprocessing
import os
import pathlib
import statistics
from collections.abc import Iterator, Sequence

import tqdm
from matplotlib import figure

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import memory, placement
from rrfp_jax.core.policies import Policy
from rrfp_jax.sim import costs, simulator

RANKS, ROUNDS = (4, 8, 16), (2, 4, 8)  # microbatches: rounds x ranks
VARIATIONS, TRANSFERS = (0.0, 0.3, 0.6, 1.0), (0.0, 0.1, 0.3)
FORWARD_S = 0.01
ACTIVATION = 68 * 2**20  # bytes that a rank's forward of a microbatch keeps; even
WEIGHT_PART = 32 / 34
BASELINE = "1F1B"
DEFAULT = "BFW memory, V"


@dataclasses.dataclass(frozen=True)
class Contender:
    """A policy and where its stages lie.

    Attributes:
      policy: without the limits that depend on P.
      in_flight: microbatches in flight on rank 0, over P.
      is_v: whether ranks hold two stages in a V.
      is_ours: whether readiness decides, at the memory of 1F1B.
    """

    policy: Policy
    in_flight: float
    is_v: bool = False
    is_ours: bool = True

    def makespan(self, cell: "Cell", seed: int, launch_ahead: int) -> tuple[float, int]:
        """Returns the makespan in seconds and the peak residual bytes of any rank."""
        ranks = cell.num_ranks
        placed = (placement.v_shaped if self.is_v else placement.one_each)(ranks)
        chunks = len(placed) // ranks
        graph = self.policy.applied_to(graphs.chain(cell.num_microbatches, placed))
        each_s = FORWARD_S / chunks
        table = costs.constant(
            graph, each_s, each_s, cell.transfer * FORWARD_S, weight_s=each_s
        )
        if cell.variation:
            table = costs.with_lognormal(table, cell.variation, seed)
            table = costs.with_lognormal_transfers(table, cell.variation, seed)
        limit_gb = ranks * ACTIVATION / memory.GIB if self.is_ours else 0.0
        policy = dataclasses.replace(
            self.policy,
            in_flight_limit=round(self.in_flight * ranks),
            memory_limit_gb=limit_gb,
            launch_ahead=launch_ahead,
        )
        kept = memory.constant(graph, ACTIVATION // chunks, WEIGHT_PART)
        trace = simulator.simulate(graph, policy, table, residuals=kept)
        peak = max(trace.peak_bytes())
        assert not self.is_ours or peak <= ranks * ACTIVATION
        return trace.makespan_s, peak


def fixed(hint: str, is_v: bool = False) -> Contender:
    """Returns a fixed order, with what it holds."""
    return Contender(Policy(hint, "fixed"), 99, is_v, is_ours=False)


CONTENDERS = {
    BASELINE: fixed("1f1b"),
    "deep 1F1B": fixed("eager_1f1b"),
    "ZB-H1": fixed("zb_h1"),
    "ZB-V": fixed("zb_v", is_v=True),
    "V-Half": fixed("v_half", is_v=True),
    "BFW": Contender(Policy("bfw"), 1),
    "ZB-H1 as hint": Contender(Policy("zb_h1"), 1),
    "BFW, V": Contender(Policy("bfw"), 1, is_v=True),
    "ZB-V as hint, V": Contender(Policy("zb_v"), 1.5, is_v=True),
    DEFAULT: Contender(Policy("bfw_memory", in_flight_taper=0.5), 1.75, is_v=True),
}
OURS = [name for name, each in CONTENDERS.items() if each.is_ours]


@dataclasses.dataclass(frozen=True)
class Cell:
    """One pipeline under one jitter."""

    num_ranks: int
    num_microbatches: int
    variation: float
    transfer: float  # over F

    def __str__(self) -> str:
        return (
            f"{self.num_ranks:>3} {self.num_microbatches:>4} "
            f"{self.variation:>4} {self.transfer:>9}"
        )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Mean speed-up over 1F1B, and memory over 1F1B's, of each contender in a cell."""

    cell: Cell
    speedups: dict[str, float]
    memories: dict[str, float]

    @property
    def best(self) -> float:
        """Of our hints and placements."""
        return max(self.speedups[name] for name in OURS)


def cells() -> Iterator[Cell]:
    """Returns the grid."""
    for ranks, rounds, variation, transfer in itertools.product(
        RANKS, ROUNDS, VARIATIONS, TRANSFERS
    ):
        yield Cell(ranks, ranks * rounds, variation, transfer)


def run(job: tuple[Cell, range, int]) -> Outcome:
    """Simulates all contenders of a cell with all seeds."""
    cell, seeds, launch_ahead = job
    speedups: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    peaks = dict.fromkeys(CONTENDERS, 0)
    for seed in seeds if cell.variation else seeds[:1]:
        ran = {
            name: each.makespan(cell, seed, launch_ahead)
            for name, each in CONTENDERS.items()
        }
        for name, (makespan_s, peak) in ran.items():
            speedups[name].append(ran[BASELINE][0] / makespan_s)
            peaks[name] = max(peaks[name], peak)
    return Outcome(
        cell,
        {name: statistics.fmean(each) for name, each in speedups.items()},
        {name: peak / peaks[BASELINE] for name, peak in peaks.items()},
    )


def geometric_mean(values: Sequence[float]) -> float:
    """Returns exp of the mean log."""
    return math.exp(statistics.fmean(map(math.log, values)))


def show(outcomes: Sequence[Outcome]) -> None:
    """Prints every cell, then the figures of the bars."""
    names = list(CONTENDERS)[1:]
    head = "  P    M   CV transfers"
    print("speed-up over 1F1B (its memory in brackets where it is another)")
    print(head, *(f"{name:>16}" for name in names), f"{'best of ours':>13}")
    for each in outcomes:
        texts = []
        for name in names:
            held = each.memories[name]
            note = f" ({held:.2f}x)" if abs(held - 1) > 0.005 else ""
            texts.append(f"{each.speedups[name]:.3f}{note}".rjust(16))
        print(each.cell, *texts, f"{each.best:13.3f}")
    jittered = [each for each in outcomes if each.cell.variation >= 0.3]
    calm = [e for e in outcomes if not e.cell.variation and not e.cell.transfer]
    print("\ngeometric means over the cells with CV >= 0.3")
    for name in names:
        mean = geometric_mean([each.speedups[name] for each in jittered])
        print(f"  {name:>16} {mean:.3f}")
    best = geometric_mean([each.best for each in jittered])
    print(f"best of ours, CV >= 0.3:        {best:.3f}   bar 1.25")
    worst = min(each.best for each in outcomes)
    print(f"worst cell of best of ours:     {worst:.3f}   bar 1.00")
    to_zb_v = min(each.best / each.speedups["ZB-V"] for each in calm)
    print(f"best over ZB-V, no jitter:      {to_zb_v:.3f}   bar 0.97")
    share = [each.speedups[DEFAULT] / each.best for each in outcomes]
    print(f"default over best, worst cell:  {min(share):.3f}   bar 0.97")
    print(f"default over best, mean:        {statistics.fmean(share):.3f}")


def write(outcomes: Sequence[Outcome], folder: pathlib.Path) -> None:
    """Writes the cells as CSV."""
    with (folder / "cells.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        memories = [f"{name}: memory" for name in CONTENDERS]
        writer.writerow(["P", "M", "CV", "transfers", *CONTENDERS, *memories])
        for each in outcomes:
            figures = [*each.speedups.values(), *each.memories.values()]
            writer.writerow(
                [*dataclasses.astuple(each.cell), *(f"{x:.4f}" for x in figures)]
            )


def draw(outcomes: Sequence[Outcome], path: pathlib.Path) -> None:
    """Draws a heat map: a row a pipeline, a column a jitter, a panel a contender."""
    shown = ["ZB-H1", "ZB-V", "BFW", DEFAULT]
    columns = list(itertools.product(TRANSFERS, VARIATIONS))
    rows = list(itertools.product(RANKS, ROUNDS))
    picture = figure.Figure(figsize=(14, 4.2), layout="constrained")
    panels = picture.subplots(1, len(shown), sharey=True)
    for panel, name in zip(panels, shown, strict=True):
        found = {outcome.cell: outcome.speedups[name] for outcome in outcomes}
        grid = [[found[Cell(p, p * r, v, t)] for t, v in columns] for p, r in rows]
        image = panel.imshow(grid, cmap="RdYlGn", vmin=0.5, vmax=1.5, aspect="auto")
        for y, x in itertools.product(range(len(rows)), range(len(columns))):
            panel.text(x, y, f"{grid[y][x]:.2f}", ha="center", va="center", fontsize=6)
        panel.set_title(name, fontsize=10, fontweight="bold")
        panel.set_xticks(
            range(len(columns)), [f"{v:g}" for _, v in columns], fontsize=7
        )
        panel.set_xlabel("CV, for transfers of 0 | 0.1 | 0.3 F", fontsize=8)
        panel.set_yticks(
            range(len(rows)), [f"P={p}, M={p * r}" for p, r in rows], fontsize=7
        )
        for edge in (3.5, 7.5):
            panel.axvline(edge, color="white", linewidth=2)
    picture.colorbar(image, ax=panels, label="speed-up over fixed 1F1B")
    picture.savefig(path, dpi=150)


def main() -> None:
    """Simulates the grid."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default="runs/equal_memory")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first_seed", type=int, default=0)
    parser.add_argument("--launch_ahead", type=int, default=1)
    flags = parser.parse_args()
    flags.out.mkdir(parents=True, exist_ok=True)
    seeds = range(flags.first_seed, flags.first_seed + flags.seeds)
    jobs = [(cell, seeds, flags.launch_ahead) for cell in cells()]
    jobs.sort(key=lambda job: -job[0].num_microbatches)  # the long ones first
    with multiprocessing.Pool(os.cpu_count()) as pool:
        found = list(
            tqdm.tqdm(pool.imap_unordered(run, jobs), "cells", len(jobs), disable=None)
        )
    outcomes = sorted(found, key=lambda o: dataclasses.astuple(o.cell))
    show(outcomes)
    write(outcomes, flags.out)
    draw(outcomes, flags.out / "cells.png")


if __name__ == "__main__":
    main()
