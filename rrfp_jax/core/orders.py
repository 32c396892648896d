"""Orders of the tasks of a rank: what fixed-order systems run, and hints may rank by.

An order lists every task of its rank once. The named ones are made from the graph:

* `gpipe`: all forwards, then all backwards (arXiv:1811.06965).
* `1f1b`: stage s runs `depth(s) - 1` forwards, then alternates, where depth(s) is the
  number of stages on the longest path from s to the loss. On a chain that is
  PipeDream's P - s; on towers that join, Cornstarch's own + language stages - s.
* `deep_1f1b`: the same with `depth` times a warm-up factor: more in flight, the same
  rigidity. The control that separates depth from readiness. With a factor of 2 it is
  `eager_1f1b`, whose warm-up is 2(P - s) - 1.

With several stages on a rank, `1f1b` is Megatron's interleaved order
(arXiv:2104.04473 §2.2), which exists only for round-robin placement of a chain. Where
the backward is split, all of these run W right after its B. Orders made for a split
backward are in `core.zero_bubble`.
"""

import collections
import math
from collections.abc import Iterable, Iterator, Sequence

from rrfp_jax.core import placement
from rrfp_jax.core.graph import PipelineGraph, chain_edges
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError

Order = tuple[Task, ...]


def gpipe(graph: PipelineGraph) -> list[Order]:
    """Returns, for each rank, all forwards stage by stage, then all backwards."""
    return [
        with_weights(
            graph,
            (
                Task(kind, s, j)
                for kind, each in ((Kind.F, stages), (Kind.B, reversed(stages)))
                for s in each
                for j in range(graph.num_microbatches)
            ),
        )
        for stages in graph.stages_of
    ]


def one_forward_one_backward(
    graph: PipelineGraph, factor: float = 1.0, group: int | None = None
) -> list[Order]:
    """Returns the 1F1B order of each rank, `factor` times as deep.

    Args:
      graph: whose tasks to order.
      factor: how much deeper than 1F1B.
      group: with several stages on a rank, how many microbatches pass a chunk before
        the next chunk's turn (Megatron's microbatch group size); by default P.

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
        return _interleaved(graph, factor, group or graph.num_ranks)
    depth = depths(graph)
    return [
        alternate_on(graph, stage, math.ceil(factor * depth[stage]) - 1)
        for (stage,) in graph.stages_of
    ]


def alternate_on(
    graph: PipelineGraph, stage: int, warmup: int, put_off: int = 0
) -> Order:
    """Returns the order of a rank that holds one stage: `warmup` forwards, then one
    forward and one backward in turn, and weight gradients as `with_weights` has them.
    """
    visiting = [
        (stage, j)
        for j in range(graph.num_microbatches)
        if graph.route(j).is_visited[stage]
    ]
    return with_weights(graph, _alternate(visiting, visiting, warmup), put_off)


def depths(graph: PipelineGraph) -> list[int]:
    """Returns, for each stage, the stages on the longest path from it to the loss."""
    depth = [1] * graph.num_stages
    for u, v in sorted(graph.edges, reverse=True):
        depth[u] = max(depth[u], depth[v] + 1)
    return depth


def _interleaved(graph: PipelineGraph, factor: float, group: int) -> list[Order]:
    """Megatron's interleaved 1F1B: microbatches in groups, chunk after chunk."""
    ranks, count = graph.num_ranks, graph.num_microbatches
    chunks = graph.num_stages // ranks
    is_plain = graph.edges == chain_edges(graph.num_stages) and not graph.skipped
    if not is_plain or graph.placement != placement.interleaved(ranks, chunks):
        raise ConfigError(
            f"order 1f1b is not defined for placement {graph.placement}: ranks hold "
            "several stages, but not a whole chain round-robin.\n"
            "  Set --config.pipeline.hint to gpipe or a CSV, or use a rule such as bf."
        )
    _check_group(ranks, chunks, count, group)
    forward = [
        (chunk, j)
        for first in range(0, count, group)
        for chunk in range(chunks)
        for j in range(first, min(first + group, count))
    ]
    warmups = [2 * (ranks - rank - 1) + (chunks - 1) * group for rank in range(ranks)]
    # The same for all ranks: a multiple would let neighbours wait for each other.
    deeper = math.ceil((factor - 1) * warmups[0])
    return [
        with_weights(
            graph,
            _alternate(
                [(chunk * ranks + rank, j) for chunk, j in forward],
                [((chunks - 1 - chunk) * ranks + rank, j) for chunk, j in forward],
                warmup + deeper,
            ),
        )
        for rank, warmup in enumerate(warmups)
    ]


def _check_group(ranks: int, chunks: int, count: int, group: int) -> None:
    """Refuses what Megatron refuses: a group, or its remainder, that starves a rank."""
    if not ranks <= group <= max(count, ranks):
        raise ConfigError(
            f"pipeline.microbatch_group={group} is not between the {ranks} ranks and "
            f"the {count} microbatches.\n"
            f"  Set --config.pipeline.microbatch_group to {ranks}, or 0 for that."
        )
    if 0 < count % group < ranks or count < ranks:
        legal = sorted(
            {max(group, count // group * group), (count // group + 1) * group}
        )
        raise ConfigError(
            f"interleaved 1f1b cannot order {count} microbatches on {ranks} ranks x "
            f"{chunks} chunks in groups of {group}: the last group has fewer "
            "microbatches than there are ranks.\n"
            "  Set --config.pipeline.num_microbatches to "
            f"{' or '.join(map(str, legal))}, or use a rule such as bf."
        )


def _alternate(
    forward: Sequence[tuple[int, int]],
    backward: Sequence[tuple[int, int]],
    warmup: int,
) -> Iterator[Task]:
    """`warmup` forwards, then one forward and one backward in turn."""
    for k in range(len(forward) + warmup):
        if k < len(forward):
            yield Task(Kind.F, *forward[k])
        if k >= warmup:
            yield Task(Kind.B, *backward[k - warmup])


def with_weights(
    graph: PipelineGraph, order: Iterable[Task], put_off: int = 0
) -> Order:
    """Leaves out what the step does not have, and puts each W right after its B.

    Args:
      graph: the step.
      order: forwards and backwards.
      put_off: how many Ws wait before the first of them runs, after another B.
    """
    found: list[Task] = []
    queued: collections.deque[Task] = collections.deque()
    for task in order:
        found.append(task)
        if task.kind is Kind.B:
            queued.append(task._replace(kind=Kind.W))
            if len(queued) > put_off:
                found.append(queued.popleft())
    return tuple(filter(graph.exists, [*found, *queued]))


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
