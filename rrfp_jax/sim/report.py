"""Where the time of a step went: makespan, bubble by cause, in flight, lower bound.

Why a rank was idle says `sim.bubbles`; here its seconds are summed.
"""

import dataclasses
from collections.abc import Iterable, Sequence

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import bubbles
from rrfp_jax.sim.bubbles import Cause, Idle
from rrfp_jax.sim.costs import CostTable, applied_to


@dataclasses.dataclass(frozen=True)
class Bubble:
    """Idle seconds by cause, of one rank or summed over ranks."""

    fill_drain_s: float = 0.0
    input_s: float = 0.0
    transfer_s: float = 0.0
    held_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All idle seconds."""
        return self.fill_drain_s + self.input_s + self.transfer_s + self.held_s


@dataclasses.dataclass(frozen=True)
class Report:
    """The figures of one step.

    Attributes:
      makespan_s: from the start to the end of the last task.
      busy_s: seconds of compute, by rank.
      bubbles: idle seconds by cause, by rank.
      peak_in_flight: microbatches begun and unfinished, by rank.
      peak_bytes: the most residuals live at once, by rank; 0 where not known.
    """

    makespan_s: float
    busy_s: tuple[float, ...]
    bubbles: tuple[Bubble, ...]
    peak_in_flight: tuple[int, ...]
    peak_bytes: tuple[int, ...]

    @property
    def bubble(self) -> Bubble:
        """The idle seconds of all ranks."""
        fields = [dataclasses.astuple(b) for b in self.bubbles]
        return Bubble(*(sum(each) for each in zip(*fields, strict=True)))

    @property
    def bubble_fraction(self) -> float:
        """Idle time over all ranks' time; 0 for an empty step."""
        return _idle_share(self.makespan_s, self.busy_s)


def bubble_fraction(trace: Trace) -> float:
    """Returns what `report` says of idle time, without looking for its causes."""
    return _idle_share(trace.makespan_s, _busy_s(trace))


def _idle_share(makespan_s: float, busy_s: Sequence[float]) -> float:
    total_s = makespan_s * len(busy_s)
    return 1 - sum(busy_s) / total_s if total_s else 0.0


def _busy_s(trace: Trace) -> tuple[float, ...]:
    return tuple(sum(s.end_s - s.start_s for s in spans) for spans in trace.by_rank())


def report(trace: Trace, blocking: bool = False) -> Report:
    """Returns the figures of a trace.

    Args:
      trace: a finished step.
      blocking: whether transfers occupied both ranks.
    """
    return Report(
        makespan_s=trace.makespan_s,
        busy_s=_busy_s(trace),
        bubbles=tuple(map(_summed, bubbles.find(trace, blocking))),
        peak_in_flight=tuple(trace.peak_in_flight()),
        peak_bytes=tuple(trace.peak_bytes()),
    )


def _summed(found: Iterable[Idle]) -> Bubble:
    spent_s = dict.fromkeys(Cause, 0.0)
    for each in found:
        spent_s[each.cause] += each.end_s - each.start_s
    return Bubble(
        fill_drain_s=spent_s[Cause.FILL] + spent_s[Cause.DRAIN],
        input_s=spent_s[Cause.INPUT],
        transfer_s=spent_s[Cause.TRANSFER],
        held_s=spent_s[Cause.HELD],
    )


def lower_bound_s(graph: PipelineGraph, costs: CostTable) -> float:
    """Returns a makespan that no order on these ranks can beat.

    For each rank: the shortest way into any of its tasks, all its work, the shortest
    way out; and the longest path through the graph.
    """
    costs = applied_to(costs, graph)
    tasks = graph.tasks()  # by microbatch, each in legal order
    head_s: dict[Task, float] = {}
    for task in tasks:
        head_s[task] = max(
            (_reach_s(graph, costs, head_s, u, task) for u in graph.inputs(task)),
            default=0.0,
        )
    tail_s: dict[Task, float] = {}
    for task in reversed(tasks):
        tail_s[task] = max(
            (
                _hop_s(graph, costs, task, v) + costs.compute_s(v) + tail_s[v]
                for v in graph.successors(task)
            ),
            default=0.0,
        )
    bound_s = max(head_s[t] + costs.compute_s(t) + tail_s[t] for t in tasks)
    for rank in range(graph.num_ranks):
        here = graph.tasks(rank)
        if here:
            work_s = sum(costs.compute_s(t) for t in here)
            ends_s = min(head_s[t] for t in here) + min(tail_s[t] for t in here)
            bound_s = max(bound_s, ends_s + work_s)
    return bound_s


def _reach_s(
    graph: PipelineGraph,
    costs: CostTable,
    head_s: dict[Task, float],
    source: Task,
    task: Task,
) -> float:
    return head_s[source] + costs.compute_s(source) + _hop_s(graph, costs, source, task)


def _hop_s(graph: PipelineGraph, costs: CostTable, source: Task, task: Task) -> float:
    if graph.rank_of(source) == graph.rank_of(task):
        return 0.0
    return costs.transfer_s(source, task.stage)
