"""When each rank was idle, and why.

Every moment of a rank is compute or bubble, and a bubble has one cause:

* fill, drain: before the rank's first task, after its last;
* transfer: what the next task waited for was under way; with blocking links, also
  whenever the rank was in a transfer or waited to begin one;
* held: some task was ready and yet not begun. Under readiness only back-pressure does
  that (in a real run, also the host's latency); under a fixed order, the order does;
* input: nothing was ready, and what the next task waited for did not exist yet.
"""

import enum
import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Span, Trace

Interval = tuple[float, float]


class Cause(enum.StrEnum):
    """Why a rank was idle."""

    FILL = "fill"
    DRAIN = "drain"
    INPUT = "input"
    TRANSFER = "transfer"
    HELD = "held"


class Idle(NamedTuple):
    """A rank did nothing from `start_s` to `end_s`, for one cause.

    `until` is the task that it ran next, and `awaited` the input of `until` that came
    last; None where there is none.
    """

    rank: int
    start_s: float
    end_s: float
    cause: Cause
    until: Task | None
    awaited: Task | None


def find(trace: Trace, blocking: bool = False) -> list[list[Idle]]:
    """Returns, by rank, when it was idle and why, in order of time.

    An entry has one cause; what a rank is idle for one after the other are several. A
    rank without a task fills all the time.

    Args:
      trace: a finished step.
      blocking: whether transfers occupied both ranks.
    """
    last_inputs, makespan_s = _last_inputs(trace), trace.makespan_s
    occupied: list[list[Interval]] = [[] for _ in range(trace.graph.num_ranks)]
    if blocking:
        exists_s = {span.task: span.end_s for span in trace.spans}
        for moved in trace.transfers:
            # A sender is not free from its compute on, a receiver only meanwhile.
            sender = (exists_s[moved.source], moved.end_s)
            occupied[trace.graph.rank_of(moved.source)].append(sender)
            occupied[trace.graph.placement[moved.to]].append(moved[2:])
    return [
        _idle(rank, spans, last_inputs, sorted(moves), makespan_s)
        for rank, (spans, moves) in enumerate(
            zip(trace.by_rank(), occupied, strict=True)
        )
    ]


class _LastInput(NamedTuple):
    """When the last input of a task was there, and when that began to move."""

    there_s: float
    began_s: float
    source: Task | None


def _last_inputs(trace: Trace) -> dict[Task, _LastInput]:
    ends = {span.task: span.end_s for span in trace.spans}
    moves = {(m.source, m.to): (m.end_s, m.start_s) for m in trace.transfers}
    found = {}
    for task, *_ in trace.spans:
        inputs = [
            _LastInput(*moves.get((source, task.stage), (ends[source],) * 2), source)
            for source in trace.graph.inputs(task)
        ]
        latest = max(inputs, key=lambda each: each[:2], default=None)
        found[task] = latest or _LastInput(0.0, 0.0, None)
    return found


def _idle(
    rank: int,
    spans: Sequence[Span],
    last_inputs: dict[Task, _LastInput],
    occupied: Sequence[Interval],
    makespan_s: float,
) -> list[Idle]:
    waits = sorted((last_inputs[s.task].there_s, s.start_s) for s in spans)
    held, moving = _Cursor(_union(waits)), _Cursor(_union(occupied))
    first_s = spans[0].start_s if spans else makespan_s
    last_s = spans[-1].end_s if spans else makespan_s
    parts = [((0.0, first_s, Cause.FILL), spans[0].task if spans else None)]
    for before, after in itertools.pairwise(spans):
        gap, awaited = (before.end_s, after.start_s), last_inputs[after.task]
        found = _parts(gap, awaited, held, moving)
        parts += [(part, after.task) for part in found]
    parts.append(((last_s, makespan_s, Cause.DRAIN), None))
    return [
        Idle(rank, *part, until, until and last_inputs[until].source)
        for part, until in parts
        if part[0] < part[1]
    ]


def _parts(
    gap: Interval, awaited: _LastInput, held: "_Cursor", moving: "_Cursor"
) -> list[tuple[float, float, Cause]]:
    """Cuts the gap before a task by cause; some parts may be empty."""
    moved, still = moving.split(gap)
    parts = [(*each, Cause.TRANSFER) for each in moved]
    for part in still:
        ready, waiting = held.split(part)
        parts += [(*each, Cause.HELD) for each in ready]
        for start_s, end_s in waiting:
            began_s = min(max(awaited.began_s, start_s), end_s)
            there_s = min(max(awaited.there_s, began_s), end_s)
            parts.append((start_s, began_s, Cause.INPUT))
            parts.append((began_s, there_s, Cause.TRANSFER))
            parts.append((there_s, end_s, Cause.INPUT))
    return sorted(parts)


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

    def split(self, gap: Interval) -> tuple[list[Interval], list[Interval]]:
        """Returns what of `gap` the intervals cover, and what they leave."""
        start, end = gap
        intervals = self._intervals
        while self._at < len(intervals) and intervals[self._at][1] <= start:
            self._at += 1
        covered, left, at = [], [], self._at
        while start < end and at < len(intervals) and intervals[at][0] < end:
            first, last = max(intervals[at][0], start), min(intervals[at][1], end)
            if start < first:
                left.append((start, first))
            covered.append((first, last))
            start = last
            at += 1
        if start < end:
            left.append((start, end))
        return covered, left
