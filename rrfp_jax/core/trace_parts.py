"""One trace from the traces of several processes, each of some of the ranks.

Seconds count from the start of the step in each process. The processes begin a step
together to within a message between them, so this is also how well their times agree.
"""

from collections.abc import Collection, Sequence
from typing import Any

from rrfp_jax.core import task
from rrfp_jax.core.trace import (
    Span,
    Told,
    Trace,
    Transfer,
    event_from_json,
    event_to_json,
)

Part = tuple[Sequence[Any], Sequence[Any], Sequence[Any]]


def pack(trace: Trace, ranks: Collection[int]) -> Part:
    """Returns what happened on `ranks`, as plain values."""
    placement = trace.graph.placement
    return (
        [
            (str(s.task), s.rank, s.start_s, s.end_s)
            for s in trace.spans
            if s.rank in ranks
        ],
        [
            (str(t.source), t.to, t.start_s, t.end_s)
            for t in trace.transfers
            if placement[t.to] in ranks or placement[t.source.stage] in ranks
        ],
        [
            (t.time_s, t.rank, *event_to_json(t.event))
            for t in trace.log
            if t.rank in ranks
        ],
    )


def complete(trace: Trace, parts: Sequence[Part]) -> None:
    """Puts the parts of all processes in place of what is in `trace`."""
    spans, transfers, log = [], [], []
    for part in parts:
        spans += [Span(task.parse(name), *rest) for name, *rest in part[0]]
        transfers += [Transfer(task.parse(name), *rest) for name, *rest in part[1]]
        log += [Told(t, rank, event_from_json([*event])) for t, rank, *event in part[2]]
    ended_s = {span.task: span.end_s for span in spans}
    # Either end may have seen a transfer; a receiver does not know when it began.
    seen = {(t.source, t.to): t for t in transfers}
    trace.spans = sorted(spans, key=lambda span: span.start_s)
    trace.transfers = [
        t
        if t.start_s < t.end_s
        else t._replace(start_s=min(ended_s.get(t.source, t.start_s), t.end_s))
        for t in seen.values()
    ]
    trace.log = sorted(log, key=lambda told: told.time_s)
