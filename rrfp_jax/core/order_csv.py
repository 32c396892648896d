"""Orders as text: the compute-only CSV of torch.distributed.pipelining.

One line a rank, entries as `0F0`, empty ones skipped. Kinds: F; B, a whole backward; I,
its input gradient; W, its weight gradient. A file that names an I or a W is one of a
split backward: its I is what this package calls B, and its B stands for both at once.
"""

import dataclasses
import re
from collections.abc import Sequence

from rrfp_jax.core import orders as orders_lib
from rrfp_jax.core import task
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.orders import Order
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError

_SPLIT = re.compile(r"\d[IW]\d")


def is_split(text: str) -> bool:
    """Whether the file orders input and weight gradients separately."""
    return _SPLIT.search(text) is not None


def from_csv(text: str, graph: PipelineGraph, source: str) -> list[Order]:
    """Reads one line a rank, entries as `0F0`; empty entries are skipped.

    The file lists every task of a step in which no stage is skipped; what this step
    skips is left out of what is returned. Where the step's backward is split and the
    file's is not, each W follows its B.

    Args:
      text: the file's content.
      graph: whose tasks the file lists, each once and on its own rank.
      source: the file's name, for messages.

    Raises:
      ConfigError: a line, an entry, a task is wrong, missing or repeated.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != graph.num_ranks:
        raise ConfigError(
            f"{source} orders {len(lines)} ranks; the pipeline has {graph.num_ranks}.\n"
            "  Write one line a rank."
        )
    whole = dataclasses.replace(graph, skipped=frozenset())
    orders = []
    for rank, line in enumerate(lines):
        order = _read_line(line, f"{source}, line {rank + 1}", is_split(text))
        if graph.is_split and not is_split(text):
            order = orders_lib.with_weights(whole, order)
        _check_complete(order, whole, rank, source)
        orders.append(tuple(filter(graph.exists, order)))
    return orders


def _read_line(line: str, where: str, is_split: bool) -> Order:
    order: list[Task] = []
    for entry in line.split(","):
        if not entry.strip():
            continue
        try:
            read = task.parse(entry.replace("I", "B"))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
        order.append(read)
        if is_split and read.kind is Kind.B and "I" not in entry:
            order.append(read._replace(kind=Kind.W))
    return tuple(order)


def to_csv(orders: Sequence[Sequence[Task]]) -> str:
    """Writes orders in the format that `from_csv` reads."""
    split = any(t.kind is Kind.W for order in orders for t in order)
    lines = [",".join(map(str, order)) for order in orders]
    return "".join((x.replace("B", "I") if split else x) + "\n" for x in lines)


def _check_complete(order: Order, graph: PipelineGraph, rank: int, source: str) -> None:
    expected, found = set(graph.tasks(rank)), set(order)
    problems = {
        "misses": expected - found,
        "repeats": {t for t in found if order.count(t) > 1}
        if len(found) < len(order)
        else (),
        "lists, though they are no tasks of this rank,": found - expected,
    }
    for verb, tasks in problems.items():
        if tasks:
            named = " ".join(map(str, sorted(tasks)[:6]))
            more = f" and {len(tasks) - 6} more" if len(tasks) > 6 else ""
            raise ConfigError(
                f"{source}, line {rank + 1} {verb} {named}{more}.\n"
                f"  List each of the {len(expected)} tasks of rank {rank} once."
            )
