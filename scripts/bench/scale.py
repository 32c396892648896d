"""How a step of up to 16,384 GPUs grows, simulated with the launch agreement.

    python scripts/bench/scale.py [--json FILE] [--out DIR]

A step is TP x PP x DP GPUs, a process each: 8 x 64 x 8 with 256 microbatches a replica,
by hint BF and by BFW (the backward split). Each replica has draws of its own, each
member of a rank's group its own transfers; a stage's gradients are reduced over the
replicas when the last of them has finished its last task there, so the step ends with
the latest reduction. Prints what it took to simulate, a fresh process a row, so that
peaks are apart; and what the step holds and sends. Bars, for both hints: 60 s and
2 GiB, in one process.

With `--out` also 512 to 16,384 GPUs, grown by PP, by TP and by DP, of which at most
`FEW` replicas are simulated, and what letters of other lengths cost. Writes scale.csv,
scale_letters.csv and scale.png; takes about ten minutes. Letters and connections
outside the ranks' groups are counted, not simulated: see `control_plane.py`.
"""

import argparse
import collections
import concurrent.futures
import csv
import dataclasses
import json
import multiprocessing
import pathlib
import resource
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import control_plane
import tqdm

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import memory, placement
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import agreed, costs, members, simulator

TASK_S, TASK_CV = 0.010, 0.3  # F, B and W each; lognormal
TRANSFER_S, TRANSFER_CV = 0.001, 1.0
LETTER_S = 0.0003  # between processes of one host: scripts/bench/transfers.py
LETTERS_S = (0.0, 0.0001, LETTER_S, 0.001, 0.003)
FEW = 2  # replicas that stand for all where a row shows how they grow
# Of a GPU, in all rows as if GPT-3 (96 layers, 12,288 wide, 2,048 tokens) were on
# 8 x 64: 34 bytes a token and unit of width in each of 1.5 layers, over 8
# (arXiv:2205.05198, table 2); and 175e9 / 512 float32 gradients.
ACTIVATION_BYTES = 34 * 2048 * 12288 * 96 // 64 // 8
GRADIENT_BYTES = 4 * 175e9 / 512
REDUCE_BYTES_PER_S = 25e9  # of each GPU, in a ring: 200 Gbit/s
BARS = {"seconds": 60.0, "peak_gib": 2.0}
SIZES = (512, 1024, 2048, 4096, 8192, 16384)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A step: ways of tensor and pipeline parallelism, and of replicas."""

    tensor: int
    ranks: int
    replicas: int
    hint: str = "bfw"
    num_microbatches: int = 256  # of each replica

    @property
    def gpus(self) -> int:
        """How many there are, and processes."""
        return self.tensor * self.ranks * self.replicas

    @property
    def policy(self) -> Policy:
        """With twice the ranks in flight, as the README advises."""
        return Policy(self.hint, in_flight_limit=2 * self.ranks)

    def graph(self) -> graphs.PipelineGraph:
        """Returns the tasks of a replica."""
        chain = graphs.chain(self.num_microbatches, placement.one_each(self.ranks))
        return self.policy.applied_to(chain)


BAR_SHAPES = (Shape(8, 64, 8, "bf"), Shape(8, 64, 8, "bfw"))
WAYS = {
    "PP": tuple(Shape(8, n // 64, 8) for n in SIZES),
    "TP": tuple(Shape(n // 512, 64, 8) for n in SIZES),
    "DP": tuple(Shape(8, 64, n // 512) for n in SIZES),
}


def simulate(
    shape: Shape, replica: int, letter_s: float, policy: Policy
) -> tuple[Trace, Sequence[int]]:
    """Returns the trace of one replica, and its rounds of agreement by rank.

    Those of the paper's agreement are simulated member by member.
    """
    graph = shape.graph()
    table = costs.constant(graph, TASK_S, TASK_S, TRANSFER_S, weight_s=TASK_S)
    transfers = [
        costs.with_lognormal_transfers(table, TRANSFER_CV, replica * 1000 + member)
        for member in range(shape.tensor)
    ]
    table = costs.with_lognormal(transfers[0], TASK_CV, replica)
    if shape.tensor == 1:
        return simulator.simulate(graph, policy, table), [0] * shape.ranks
    if policy.agreement == "per_task":
        found = members.simulate(graph, policy, table, transfers, lambda: letter_s)
    else:
        found = agreed.simulate(graph, policy, table, transfers, letter_s)
    return found.trace, found.num_rounds


def step(shape: Shape, simulated: int) -> dict[str, Any]:
    """Simulates a step, one replica after another, and returns its figures.

    Args:
      shape: of the step.
      simulated: how many of its replicas stand for all.
    """
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    ends_s: dict[int, float] = collections.defaultdict(float)
    in_flight, num_tasks, num_messages = 0, 0, 0
    num_rounds: list[int] = []  # of each rank of each replica
    for replica in range(simulated):
        trace, rounds = simulate(shape, replica, LETTER_S, shape.policy)
        for span in trace.spans:
            ends_s[span.task.stage] = max(ends_s[span.task.stage], span.end_s)
        in_flight = max(in_flight, *trace.peak_in_flight())
        num_tasks += len(trace.spans)
        num_messages += len(trace.transfers) * shape.tensor
        num_rounds += rounds
    ring = 2 * (shape.replicas - 1) / shape.replicas
    reduction_s = ring * GRADIENT_BYTES / REDUCE_BYTES_PER_S
    rounds_a_rank = statistics.mean(num_rounds)
    rounds_a_task = sum(num_rounds) / num_tasks
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "gpus": shape.gpus,
        "tp": shape.tensor,
        "pp": shape.ranks,
        "dp": shape.replicas,
        "hint": shape.hint,
        "simulated": simulated,
        "tasks": num_tasks * shape.replicas // simulated,
        "seconds": time.perf_counter() - began_s,
        "cpu_s": time.process_time() - began_cpu_s,
        "peak_gib": peak_kib * 1024 / memory.GIB,
        "makespan_s": max(ends_s.values()),
        "step_s": max(ends_s.values()) + reduction_s,
        "payload_parts": num_messages * shape.replicas // simulated,
        "rounds_a_rank": rounds_a_rank,
        "rounds_a_task": rounds_a_task,
        "proposals_a_process": rounds_a_rank * (shape.tensor - 1),
        "in_flight": in_flight,
        "residual_gib": in_flight * ACTIVATION_BYTES / memory.GIB,
    } | control_plane.counts(shape.tensor, shape.ranks, shape.replicas)


def figures(wanted: dict[Shape, int]) -> dict[Shape, dict[str, Any]]:
    """Simulates some replicas of steps, each step in a fresh process, in turn."""
    found = {}
    total = sum(shape.ranks * simulated for shape, simulated in wanted.items())
    with (
        tqdm.tqdm(total=total, unit="rank", desc="simulate") as bar,
        concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as pool,
    ):
        for shape, simulated in wanted.items():
            bar.set_postfix_str(f"{shape.gpus} GPUs")
            found[shape] = pool.submit(step, shape, simulated).result()
            bar.update(shape.ranks * simulated)
    return found


_COLUMNS = {
    "gpus": "{:>6}",
    "tp": "{:>3}",
    "pp": "{:>4}",
    "dp": "{:>3}",
    "hint": "{:>4}",
    "simulated": "{:>9}",
    "tasks": "{:>8}",
    "seconds": "{:>8.1f}",
    "cpu_s": "{:>6.1f}",
    "peak_gib": "{:>9.2f}",
    "step_s": "{:>7.2f}",
    "payload_parts": "{:>14}",
    "rounds_a_rank": "{:>14.0f}",
    "rounds_a_task": "{:>14.2f}",
    "proposals_a_process": "{:>20.0f}",
    "residual_gib": "{:>13.1f}",
    "gather_letters_a_process": "{:>25}",
    "connections_a_process": "{:>22}",
}


def show(rows: Iterable[dict[str, Any]]) -> None:
    """Prints a table."""
    widths = {name: len(form.format(0)) for name, form in _COLUMNS.items()}
    print(" ".join(name.rjust(widths[name]) for name in _COLUMNS))
    for row in rows:
        print(" ".join(form.format(row[name]) for name, form in _COLUMNS.items()))


def letters() -> list[dict[str, Any]]:
    """Returns how long replicas of 8 x 64 take, by their letters; 64 microbatches."""
    shapes = [dataclasses.replace(shape, num_microbatches=64) for shape in BAR_SHAPES]
    cases = [
        (shape, dataclasses.replace(shape.policy, launch_ahead=ahead, agreement=name))
        for shape in shapes
        for name, aheads in (("intersection", (1, 2, 3)), ("per_task", (1,)))
        for ahead in aheads
    ]
    rows = []
    for shape, policy in tqdm.tqdm(cases, "letters"):
        row = {"hint": shape.hint, "agreement": policy.agreement}
        rows.append(row | {"launch_ahead": policy.launch_ahead})
        for letter_s in LETTERS_S:
            rows[-1][f"{letter_s * 1e3:g} ms"] = statistics.mean(
                simulate(shape, replica, letter_s, policy)[0].makespan_s
                for replica in range(FEW)
            )
    return rows


def write(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Writes a CSV."""
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow(
                {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
            )


_PANELS = (
    ("step_s", "a step, s"),
    ("peak_gib", "to simulate a step, GiB"),
    ("rounds_a_rank", "rounds of agreement, a rank and step"),
    ("proposals_a_process", "proposals sent, a process and step"),
    ("residual_gib", "residuals, GiB a GPU"),
    ("connections_a_process", "connections, a process"),
)


def _draw(found: dict[Shape, dict[str, Any]], path: pathlib.Path) -> None:
    from matplotlib import figure  # here: the rows' processes are not to load it

    canvas = figure.Figure(figsize=(12, 6.5), layout="constrained")
    axes = canvas.subplots(2, 3, sharex=True).flat
    for axis, (name, label) in zip(axes, _PANELS, strict=True):
        for way, shapes in WAYS.items():
            rows = [found[shape] for shape in shapes]
            sizes = [row["gpus"] for row in rows]
            axis.plot(sizes, [row[name] for row in rows], "o-", label=f"by {way}")
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES, map(str, SIZES), rotation=45)
        axis.set_title(label, fontsize=10)
        axis.set_ylim(0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    canvas.supxlabel("GPUs, from and to 8 (TP) x 64 (PP) x 8 (DP) = 4,096", fontsize=10)
    canvas.savefig(path, dpi=110)


def main() -> None:
    """Simulates, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    parser.add_argument("--out", type=pathlib.Path, help="all sizes; the folder")
    arguments = parser.parse_args()
    wanted = {shape: shape.replicas for shape in BAR_SHAPES}
    if arguments.out:
        for shape in (shape for shapes in WAYS.values() for shape in shapes):
            wanted.setdefault(shape, min(FEW, shape.replicas))
    found = figures(wanted)
    show(found.values())
    worst = {name: max(found[s][name] for s in BAR_SHAPES) for name in BARS}
    for name, bar in BARS.items():
        verdict = "ok" if worst[name] <= bar else "ABOVE"
        print(f"{name:10} {worst[name]:8.2f}      bar {bar:g}: {verdict}")
    if arguments.json:
        arguments.json.write_text(json.dumps(worst) + "\n")
    if arguments.out:
        write([*found.values()], arguments.out / "scale.csv")
        _draw(found, arguments.out / "scale.png")
        by_letters = letters()
        write(by_letters, arguments.out / "scale_letters.csv")
        for row in by_letters:
            print(*(f"{v:.4f}" if isinstance(v, float) else v for v in row.values()))


if __name__ == "__main__":
    main()
