"""Where the time of a step went: makespan, bubble by cause, in flight, lower bound.

Every moment of a rank is compute or bubble, and a bubble has one cause:

* fill, drain: before the rank's first task, after its last;
* transfer: what the next task waited for was under way; with blocking links, also
  whenever the rank was in a transfer or waited to begin one;
* held: some task was ready and yet not begun. Under readiness only back-pressure does
  that (in a real run, also the host's latency); under a fixed order, the order does;
* input: nothing was ready, and what the next task waited for did not exist yet.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Span, Trace
from rrfp_jax.sim.costs import CostTable, applied_to

Interval = tuple[float, float]


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
    available = _availability(trace)
    occupied: list[list[Interval]] = [[] for _ in range(trace.graph.num_ranks)]
    if blocking:
        exists_s = {span.task: span.end_s for span in trace.spans}
        for moved in trace.transfers:
            # A sender is not free from its compute on, a receiver only meanwhile.
            sender = (exists_s[moved.source], moved.end_s)
            occupied[trace.graph.rank_of(moved.source)].append(sender)
            occupied[trace.graph.placement[moved.to]].append(moved[2:])
    by_rank = trace.by_rank()
    return Report(
        makespan_s=trace.makespan_s,
        busy_s=_busy_s(trace),
        bubbles=tuple(
            _bubble(spans, available, sorted(moves), trace.makespan_s)
            for spans, moves in zip(by_rank, occupied, strict=True)
        ),
        peak_in_flight=tuple(trace.peak_in_flight()),
        peak_bytes=tuple(trace.peak_bytes()),
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


def _availability(trace: Trace) -> dict[Task, tuple[float, float]]:
    """For each task: when its last input was there, and when that began to move."""
    ends = {span.task: span.end_s for span in trace.spans}
    moves = {(m.source, m.to): (m.end_s, m.start_s) for m in trace.transfers}
    return {
        span.task: max(
            (
                moves.get((source, span.task.stage), (ends[source], ends[source]))
                for source in trace.graph.inputs(span.task)
            ),
            default=(0.0, 0.0),
        )
        for span in trace.spans
    }


def _bubble(
    spans: Sequence[Span],
    available: dict[Task, tuple[float, float]],
    occupied: Sequence[Interval],
    makespan_s: float,
) -> Bubble:
    if not spans:
        return Bubble(fill_drain_s=makespan_s)
    waits = sorted((available[s.task][0], s.start_s) for s in spans)
    held, moving = _Cursor(_union(waits)), _Cursor(_union(occupied))
    transfer_s = held_s = input_s = 0.0
    for before, after in itertools.pairwise(spans):
        arrived_s, began_s = available[after.task]
        moving_s, still = moving.split((before.end_s, after.start_s))
        transfer_s += moving_s
        for part in still:
            part_s, waiting = held.split(part)
            held_s += part_s
            for start_s, end_s in waiting:
                under_way_s = min(arrived_s, end_s) - max(began_s, start_s)
                transfer_s += max(0.0, under_way_s)
                input_s += end_s - start_s - max(0.0, under_way_s)
    ends_s = spans[0].start_s + makespan_s - spans[-1].end_s
    return Bubble(ends_s, input_s, transfer_s, held_s)


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals sorted by their start."""
    merged: list[Interval] = []
    for start, end in intervals:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif end > start:
            merged.append((start, end))
    return merged


class _Cursor:
    """Cuts ascending gaps by disjoint ascending intervals."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self._intervals = intervals
        self._at = 0

    def split(self, gap: Interval) -> tuple[float, list[Interval]]:
        """Returns how much of `gap` the intervals cover, and what they leave."""
        start, end = gap
        intervals = self._intervals
        while self._at < len(intervals) and intervals[self._at][1] <= start:
            self._at += 1
        covered, left, at = 0.0, [], self._at
        while start < end and at < len(intervals) and intervals[at][0] < end:
            first, last = max(intervals[at][0], start), min(intervals[at][1], end)
            if start < first:
                left.append((start, first))
            covered += last - first
            start = last
            at += 1
        if start < end:
            left.append((start, end))
        return covered, left
