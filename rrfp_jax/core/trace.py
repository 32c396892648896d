"""What happened in one step: when each task and transfer ran, and in which order.

A trace holds the events that each dispatcher was given, in order, so it can be
replayed: fed the same events, fresh dispatchers launch the same tasks.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from rrfp_jax.core import events, orders, task
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import InvariantError


class Span(NamedTuple):
    """A task occupied its rank from `start_s` to `end_s`."""

    task: Task
    rank: int
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """The output of `source` was under way to stage `to` from `start_s` to `end_s`."""

    source: Task
    to: int
    start_s: float
    end_s: float


class Told(NamedTuple):
    """Rank `rank` was told `event` at `time_s`."""

    time_s: float
    rank: int
    event: events.Event


class Trace:
    """The record of one step. Seconds count from the start of the step.

    Attributes:
      graph: the tasks of the step.
      residuals: what each task keeps, where that is known.
      spans: one a task, in launch order of each rank.
      transfers: one a send.
      log: every event, in the order in which the dispatchers were told.
    """

    def __init__(
        self, graph: PipelineGraph, residuals: Residuals | None = None
    ) -> None:
        self.graph = graph
        self.residuals = residuals
        self.spans: list[Span] = []
        self.transfers: list[Transfer] = []
        self.log: list[Told] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Trace) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    @property
    def makespan_s(self) -> float:
        """When the last task ended."""
        return max((span.end_s for span in self.spans), default=0.0)

    def by_rank(self) -> list[list[Span]]:
        """Returns the spans of each rank in launch order."""
        found: list[list[Span]] = [[] for _ in range(self.graph.num_ranks)]
        for span in self.spans:
            found[span.rank].append(span)
        return found

    def launches(self) -> list[list[Task]]:
        """Returns the launch sequence of each rank."""
        return [[span.task for span in spans] for spans in self.by_rank()]

    def peak_in_flight(self) -> list[int]:
        """Returns, by rank, the most microbatches begun and unfinished at once."""
        return [
            orders.peak_in_flight(order, self.graph, rank)
            for rank, order in enumerate(self.launches())
        ]

    def live_bytes(self) -> list[list[int]]:
        """Returns, by rank, the residual bytes after each launch, in launch order.

        Empty lists where the residuals are not known.
        """
        if self.residuals is None:
            return [[] for _ in range(self.graph.num_ranks)]
        return [self.residuals.live(order) for order in self.launches()]

    def peak_bytes(self) -> list[int]:
        """Returns, by rank, the most residual bytes live at once; 0 if not known."""
        return [max(each, default=0) for each in self.live_bytes()]

    def grid(self, num_columns: int = 100) -> str:
        """Returns a picture in text: a line a rank, a column a slice of time."""
        width = max(self.makespan_s, 1e-9) / num_columns
        lines = []
        for rank, spans in enumerate(self.by_rank()):
            cells = ["."] * num_columns
            for span in spans:
                first = min(int(span.start_s / width), num_columns - 1)
                last = max(first + 1, min(round(span.end_s / width), num_columns))
                label = (
                    str(span.task)
                    if len(self.graph.stages_of[rank]) > 1
                    else (f"{span.task.kind}{span.task.microbatch}")
                )
                text = label.ljust(last - first, "-")[: last - first]
                cells[first:last] = text
            lines.append(f"rank {rank:>2} |{''.join(cells)}|")
        return "\n".join(lines)

    def story(self, of: Task) -> str:
        """Returns the life of one task, a line an event."""
        rank = self.graph.rank_of(of)
        inputs = self.graph.inputs(of)
        lines: list[tuple[float, str]] = []
        for span in self.spans:
            if span.task in inputs:
                lines.append((span.end_s, f"{span.task} ended on rank {span.rank}"))
            if span.task == of:
                lines.append((span.start_s, f"{of} began on rank {rank}"))
                lines.append((span.end_s, f"{of} ended"))
        for transfer in self.transfers:
            if transfer.to == of.stage and transfer.source in inputs:
                lines.append((transfer.end_s, f"{transfer.source} arrived"))
        return "\n".join(f"{t * 1e3:10.3f} ms  {text}" for t, text in sorted(lines))


def replay(trace: Trace, dispatchers: Sequence[Dispatcher]) -> list[list[Task]]:
    """Feeds the events of `trace` to fresh dispatchers; returns what each launches.

    What other members of a group proposed is among the events; what is proposed to them
    goes nowhere.

    Args:
      trace: of one process.
      dispatchers: of the ranks in it, in any order, which the answer keeps.

    Raises:
      InvariantError: an event cannot follow those before it: the dispatchers are of
        another policy, or the trace is not a faithful record.
    """
    by_rank = {dispatcher.rank: dispatcher for dispatcher in dispatchers}
    launched: dict[int, list[Task]] = {rank: [] for rank in by_rank}
    for told in trace.log:
        for instruction in by_rank[told.rank].handle(told.event):
            if isinstance(instruction, events.Launch):
                launched[told.rank].append(instruction.task)
    if not all(dispatcher.is_done for dispatcher in dispatchers):
        raise InvariantError("the replayed events leave tasks undone.")
    return list(launched.values())


def to_json(trace: Trace) -> str:
    """Writes a trace as one JSON object."""
    graph = trace.graph
    return json.dumps(
        {
            "graph": {
                "num_stages": graph.num_stages,
                "num_microbatches": graph.num_microbatches,
                "edges": graph.edges,
                "placement": graph.placement,
                "skipped": sorted(graph.skipped),
                "frozen": sorted(graph.frozen),
                "is_split": graph.is_split,
                "in_order": graph.in_order,
            },
            "residuals": trace.residuals
            and [
                (kind, stage, each)
                for (kind, stage), each in trace.residuals.num_bytes.items()
            ],
            "spans": [(str(s.task), s.start_s, s.end_s) for s in trace.spans],
            "transfers": [
                (str(t.source), t.to, t.start_s, t.end_s) for t in trace.transfers
            ],
            "log": [(t.time_s, t.rank, *event_to_json(t.event)) for t in trace.log],
        }
    )


def from_json(text: str) -> Trace:
    """Reads what `to_json` wrote."""
    data = json.loads(text)
    graph = PipelineGraph(
        num_stages=data["graph"]["num_stages"],
        num_microbatches=data["graph"]["num_microbatches"],
        edges=tuple((u, v) for u, v in data["graph"]["edges"]),
        placement=tuple(data["graph"]["placement"]),
        skipped=frozenset((s, j) for s, j in data["graph"]["skipped"]),
        frozen=frozenset(data["graph"]["frozen"]),
        is_split=data["graph"]["is_split"],
        in_order=data["graph"]["in_order"],
    )
    residuals = data["residuals"] and Residuals(
        {(Kind(kind), stage): tuple(each) for kind, stage, each in data["residuals"]}
    )
    trace = Trace(graph, residuals)
    for name, start_s, end_s in data["spans"]:
        ran = task.parse(name)
        trace.spans.append(Span(ran, graph.rank_of(ran), start_s, end_s))
    for name, to, start_s, end_s in data["transfers"]:
        trace.transfers.append(Transfer(task.parse(name), to, start_s, end_s))
    for time_s, rank, *event in data["log"]:
        trace.log.append(Told(time_s, rank, event_from_json(event)))
    return trace


def event_to_json(event: events.Event) -> list[Any]:
    """Returns an event as plain values."""
    match event:
        case events.Arrived(source, to):
            return ["Arrived", str(source), to]
        case events.Finished(finished):
            return ["Finished", str(finished)]
        case events.Proposed(member, proposal):
            ready = [str(proposed) for proposed in proposal.ready]
            return ["Proposed", member, proposal.round, ready, proposal.room]
        case events.Started():
            return ["Started"]


def event_from_json(fields: Sequence[Any]) -> events.Event:
    """Returns the event that `event_to_json` wrote."""
    match fields:
        case ["Arrived", source, to]:
            return events.Arrived(task.parse(source), to)
        case ["Finished", finished]:
            return events.Finished(task.parse(finished))
        case ["Proposed", member, number, ready, room]:
            tasks = tuple(task.parse(name) for name in ready)
            return events.Proposed(member, events.Proposal(number, tasks, room))
        case ["Started"]:
            return events.Started()
        case _:
            raise ValueError(f"{fields} is not an event of a trace.")
