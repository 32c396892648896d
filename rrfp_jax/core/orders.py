"""Orders of the tasks of a rank: what fixed-order systems run, and hints may rank by.

An order lists every task of its rank once. The named ones are made from the graph:

* `gpipe`: all forwards, then all backwards (arXiv:1811.06965).
* `1f1b`: stage s runs `depth(s) - 1` forwards, then alternates, where depth(s) is the
  number of stages on the longest path from s to the loss. On a chain that is
  PipeDream's P - s; on towers that join, Cornstarch's own + language stages - s.
* `deep_1f1b`: the same with `depth` times a warm-up factor: more in flight, the same
  rigidity. The control that separates depth from readiness.

With several stages on a rank, `1f1b` is Megatron's interleaved order
(arXiv:2104.04473 §2.2), which exists only for round-robin placement of a chain.
"""

import dataclasses
import math
from collections.abc import Sequence

from rrfp_jax.core import placement, task
from rrfp_jax.core.graph import PipelineGraph, chain_edges
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError

Order = tuple[Task, ...]


def gpipe(graph: PipelineGraph) -> list[Order]:
    """Returns, for each rank, all forwards stage by stage, then all backwards."""
    orders = []
    for stages in graph.stages_of:
        order = [(Kind.F, s) for s in stages] + [(Kind.B, s) for s in reversed(stages)]
        orders.append(
            tuple(
                found
                for kind, s in order
                for j in range(graph.num_microbatches)
                if _exists(graph, found := Task(kind, s, j))
            )
        )
    return orders


def one_forward_one_backward(graph: PipelineGraph, factor: float = 1.0) -> list[Order]:
    """Returns the 1F1B order of each rank, `factor` times as deep.

    Raises:
      ConfigError: the factor is below 1, or ranks hold several stages in a way that
        1F1B is not defined for.
    """
    if factor < 1:
        raise ConfigError(
            f"pipeline.warmup_factor={factor} is shallower than 1F1B.\n"
            "  Set --config.pipeline.warmup_factor to 1 or more."
        )
    if graph.num_ranks < graph.num_stages:
        return _interleaved(graph, factor)
    depth = depths(graph)
    orders: list[Order] = []
    for (stage,) in graph.stages_of:
        visiting = [
            j for j in range(graph.num_microbatches) if graph.route(j).is_visited[stage]
        ]
        forward = [(stage, j) for j in visiting]
        orders.append(
            _alternate(graph, forward, forward, math.ceil(factor * depth[stage]) - 1)
        )
    return orders


def depths(graph: PipelineGraph) -> list[int]:
    """Returns, for each stage, the stages on the longest path from it to the loss."""
    depth = [1] * graph.num_stages
    for u, v in sorted(graph.edges, reverse=True):
        depth[u] = max(depth[u], depth[v] + 1)
    return depth


def _interleaved(graph: PipelineGraph, factor: float) -> list[Order]:
    """Megatron's interleaved 1F1B: microbatches in groups of P, chunk after chunk."""
    ranks, count = graph.num_ranks, graph.num_microbatches
    chunks = graph.num_stages // ranks
    is_plain = graph.edges == chain_edges(graph.num_stages) and not graph.skipped
    if not is_plain or graph.placement != placement.interleaved(ranks, chunks):
        raise ConfigError(
            f"order 1f1b is not defined for placement {graph.placement}: ranks hold "
            "several stages, but not a whole chain round-robin.\n"
            "  Set --config.pipeline.hint to gpipe or a CSV, or use a rule such as bf."
        )
    if count % ranks:
        legal = sorted(
            {max(ranks, count // ranks * ranks), (count // ranks + 1) * ranks}
        )
        raise ConfigError(
            f"interleaved 1f1b cannot order {count} microbatches on {ranks} ranks x "
            f"{chunks} chunks: the ranks must divide the microbatches.\n"
            "  Set --config.pipeline.num_microbatches to "
            f"{' or '.join(map(str, legal))}, or use a rule such as bf."
        )
    group = ranks * chunks
    forward = [
        (k // ranks % chunks, k // group * ranks + k % ranks)
        for k in range(count * chunks)
    ]
    warmups = [2 * (ranks - rank - 1) + (chunks - 1) * ranks for rank in range(ranks)]
    # The same for all ranks: a multiple would let neighbours wait for each other.
    deeper = math.ceil((factor - 1) * warmups[0])
    return [
        _alternate(
            graph,
            [(chunk * ranks + rank, j) for chunk, j in forward],
            [((chunks - 1 - chunk) * ranks + rank, j) for chunk, j in forward],
            warmup + deeper,
        )
        for rank, warmup in enumerate(warmups)
    ]


def _alternate(
    graph: PipelineGraph,
    forward: Sequence[tuple[int, int]],
    backward: Sequence[tuple[int, int]],
    warmup: int,
) -> Order:
    """`warmup` forwards, then one forward and one backward in turn."""
    order: list[Task] = []
    for k in range(len(forward) + warmup):
        if k < len(forward):
            order.append(Task(Kind.F, *forward[k]))
        if k >= warmup:
            order.append(Task(Kind.B, *backward[k - warmup]))
    return tuple(found for found in order if _exists(graph, found))


def _exists(graph: PipelineGraph, found: Task) -> bool:
    route = graph.route(found.microbatch)
    if found.kind is Kind.F:
        return route.is_visited[found.stage]
    return route.has_backward[found.stage]


def from_csv(text: str, graph: PipelineGraph, source: str) -> list[Order]:
    """Reads one line a rank, entries as `0F0`; empty entries are skipped.

    This is the compute-only format of torch.distributed.pipelining with B for a whole
    backward. The file lists every task of a step in which no stage is skipped; what
    this step skips is left out of what is returned.

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
        order = _read_line(line, f"{source}, line {rank + 1}")
        _check_complete(order, whole, rank, source)
        orders.append(tuple(found for found in order if _exists(graph, found)))
    return orders


def _read_line(line: str, where: str) -> Order:
    try:
        return tuple(task.parse(entry) for entry in line.split(",") if entry.strip())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_csv(orders: Sequence[Sequence[Task]]) -> str:
    """Writes orders in the format that `from_csv` reads."""
    return "".join(",".join(map(str, order)) + "\n" for order in orders)


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


def peak_in_flight(order: Sequence[Task], graph: PipelineGraph, rank: int) -> int:
    """Returns the most microbatches begun and unfinished at once on a rank."""
    left: dict[int, int] = {}
    peak = 0
    for launched in order:
        j = launched.microbatch
        left.setdefault(j, graph.route(j).num_tasks[rank])
        peak = max(peak, len(left))
        left[j] -= 1
        if not left[j]:
            del left[j]
    return peak


def check_finishes(orders: Sequence[Order], graph: PipelineGraph) -> None:
    """Runs fixed orders dry, without time.

    Raises:
      ConfigError: the orders cannot finish; says which task each rank is stuck at.
    """
    position = [0] * len(orders)
    done: set[Task] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, order in enumerate(orders):
            while position[rank] < len(order) and all(
                needed in done for needed in graph.inputs(order[position[rank]])
            ):
                done.add(order[position[rank]])
                position[rank] += 1
                is_moving = True
    stuck = [
        f"rank {r}: {order[at]} misses "
        + " ".join(str(t) for t in graph.inputs(order[at]) if t not in done)
        for r, (order, at) in enumerate(zip(orders, position, strict=True))
        if at < len(order)
    ]
    if stuck:
        raise ConfigError(
            "the fixed order cannot finish: its ranks wait for each other.\n  "
            + "\n  ".join(stuck)
            + "\n  Reorder these tasks, or use the order as a hint: "
            "--config.pipeline.order=readiness --config.pipeline.hint=FILE."
        )
