"""Traces for ui.perfetto.dev and chrome://tracing.

A process is a pipeline rank; its threads are its compute and each link that it sends
on. A flow arrow goes from a task through each transfer of its output to the task that
was given it. Where residuals are known, a counter shows the live bytes of each rank;
they change when a task is launched, which is shown at its start. Times are in
microseconds, as the trace-event format wants them.

Source: "Trace Event Format", Google, 2016.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Span, Trace, Transfer

_COMPUTE = 0  # thread id; those of the links follow
_NANOSECOND = 1e-3  # in microseconds

_Event = dict[str, Any]


def to_chrome(trace: Trace) -> dict[str, Any]:
    """Returns a trace as one JSON object of the trace-event format."""
    threads = _Threads(trace)
    return {
        "traceEvents": [
            *_names(trace.graph, threads),
            *(_compute(span) for span in trace.spans),
            *_transfers(trace, threads),
            *_residuals(trace),
        ],
        "displayTimeUnit": "ms",
    }


def write(trace: Trace, path: str | pathlib.Path) -> None:
    """Writes a trace to a file that Perfetto and Chrome open."""
    pathlib.Path(path).write_text(json.dumps(to_chrome(trace)))


class _Threads:
    """Gives each transfer a thread of its sender.

    A link has one thread, and more where its transfers overlap in time, as they may on
    a real network: the events of one thread must not.

    Attributes:
      of: the thread of each transfer, in the order of the trace.
      names: (sender, thread) -> name.
    """

    def __init__(self, trace: Trace) -> None:
        placement = trace.graph.placement
        lanes: dict[tuple[int, int], list[float]] = {}  # when each lane is free
        ids: dict[tuple[int, int, int], int] = {}
        count = [_COMPUTE] * trace.graph.num_ranks
        self.of: list[int] = [0] * len(trace.transfers)
        self.names: dict[tuple[int, int], str] = {}
        in_time = sorted(enumerate(trace.transfers), key=lambda each: each[1].start_s)
        for index, moved in in_time:
            sender, receiver = placement[moved.source.stage], placement[moved.to]
            free_s = lanes.setdefault((sender, receiver), [])
            lane = next(
                (i for i, s in enumerate(free_s) if s <= moved.start_s), len(free_s)
            )
            if lane == len(free_s):
                free_s.append(0.0)
                count[sender] += 1
                ids[sender, receiver, lane] = count[sender]
                more = f" ({lane + 1})" if lane else ""
                self.names[sender, count[sender]] = f"link to rank {receiver}{more}"
            free_s[lane] = moved.end_s
            self.of[index] = ids[sender, receiver, lane]


def _names(graph: PipelineGraph, threads: _Threads) -> list[_Event]:
    events = []
    for rank, stages in enumerate(graph.stages_of):
        held = f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"
        events += [
            _metadata("process_name", rank, {"name": f"rank {rank} ({held})"}),
            _metadata("process_sort_index", rank, {"sort_index": rank}),
            _metadata("thread_name", rank, {"name": "compute"}),
        ]
    for (rank, thread), name in threads.names.items():
        events.append(_metadata("thread_name", rank, {"name": name}, thread))
    return events


def _metadata(
    name: str, rank: int, args: Mapping[str, object], thread: int = _COMPUTE
) -> _Event:
    return {"name": name, "ph": "M", "pid": rank, "tid": thread, "args": args}


def _compute(span: Span) -> _Event:
    kind, stage, microbatch = span.task
    return {
        "name": str(span.task),
        "cat": "compute",
        "ph": "X",
        "pid": span.rank,
        "tid": _COMPUTE,
        **_times(span),
        "args": {"kind": kind.value, "stage": stage, "microbatch": microbatch},
    }


def _transfers(trace: Trace, threads: _Threads) -> list[_Event]:
    ran = {span.task: span for span in trace.spans}
    events = []
    for index, moved in enumerate(trace.transfers):
        kind, stage, microbatch = moved.source
        sender = trace.graph.placement[stage]
        at = {"pid": sender, "tid": threads.of[index]}
        args = {"kind": kind.value, "stage": stage, "microbatch": microbatch}
        events.append(
            {
                "name": f"{moved.source} to stage {moved.to}",
                "cat": "transfer",
                "ph": "X",
                **at,
                **_times(moved),
                "args": args | {"to": moved.to},
            }
        )
        source = ran[moved.source]
        receiver = ran.get(Task(kind, moved.to, microbatch))
        flow = {"name": str(moved.source), "cat": "flow", "id": index}
        # A flow event belongs to the slice that holds its time, and a slice does not
        # hold its end.
        left_us = max(source.start_s * 1e6, source.end_s * 1e6 - _NANOSECOND)
        compute = {"pid": sender, "tid": _COMPUTE}
        events.append({**flow, "ph": "s", **compute, "ts": left_us})
        events.append({**flow, "ph": "t", **at, "ts": moved.start_s * 1e6})
        if receiver is not None:
            there = {"pid": receiver.rank, "tid": _COMPUTE}
            begins = {"ts": receiver.start_s * 1e6, "bp": "e"}
            events.append({**flow, "ph": "f", **there, **begins})
    return events


def _residuals(trace: Trace) -> list[_Event]:
    if trace.residuals is None:
        return []
    counter = {"name": "live residuals", "cat": "memory", "ph": "C", "tid": _COMPUTE}
    return [
        {
            **counter,
            "pid": span.rank,
            "ts": span.start_s * 1e6,
            "args": {"bytes": num_bytes},
        }
        for spans, live in zip(trace.by_rank(), trace.live_bytes(), strict=True)
        for span, num_bytes in zip(spans, live, strict=True)
    ]


def _times(of: Span | Transfer) -> dict[str, float]:
    return {"ts": of.start_s * 1e6, "dur": (of.end_s - of.start_s) * 1e6}
