"""The in-flight limit of a rank: which forwards are withheld, and why nothing stalls.

A microbatch is *in flight* on a rank from its first launched task there until its last
(that is its last backward, where it has one on this rank). Two rules:

`Reserving`, the default, bounds the microbatches in flight. Whatever an admitted
microbatch still needs here is always admissible; a new microbatch needs a free slot,
and the last slot is reserved for the lowest microbatch that is unfinished here. So the
bound is exact, also with several stages on a rank.

`OneByOne` is the paper's (RRFP §5, Appendix C): it counts forwards minus backwards. At
the limit, a rank leaves readiness-first mode and takes only the next local task of the
lowest unfinished microbatch, in the strict order F ascending, B descending. With C
stages on the rank it may overshoot by C.

Why neither can stall, for any DAG, placement, hint and limit >= 1: let j be the lowest
microbatch that is unfinished anywhere. On every rank where j is unfinished it is the
lowest there, so its next task is always admissible; its tasks need only each other;
hence one of them is running, in transit, or ready and admissible on a rank that becomes
free. A naive cap on forwards has no such j: two towers may admit different microbatches
and wait for each other at the join, and on an interleaved placement admitted
microbatches may lack the slots for their own later chunks.
"""

import collections
import enum
from collections.abc import Iterable
from typing import NamedTuple, Protocol

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError


class Open(enum.Enum):
    """An admission without a parameter."""

    ALL = enum.auto()  # every ready task
    ADMITTED = enum.auto()  # backwards, and forwards of microbatches that have begun


class Lowest(NamedTuple):
    """Admits backwards, microbatches that have begun, and this one."""

    microbatch: int


class Only(NamedTuple):
    """Admits one task and nothing else."""

    task: Task


Admission = Open | Lowest | Only


class BackPressure(Protocol):
    """Decides admission on one rank and learns of each launch there."""

    @property
    def limit(self) -> int:
        """The in-flight limit."""
        ...

    def admission(self) -> Admission:
        """Returns which ready tasks may be launched now."""
        ...

    def has_begun(self, microbatch: int) -> bool:
        """Whether a task of `microbatch` was launched here."""
        ...

    def launched(self, task: Task) -> None:
        """Learns that `task` was launched."""
        ...


class Reserving:
    """Bounds the microbatches in flight, exactly; reserves the last slot.

    Attributes:
      limit: the bound.
      num_in_flight: microbatches of which some but not all tasks were launched here.
    """

    def __init__(self, graph: PipelineGraph, rank: int, limit: int) -> None:
        self.limit = check_limit(limit)
        self.num_in_flight = 0
        self._unfinished = _Countdown(graph, rank)
        self._begun: set[int] = set()
        self.has_begun = self._begun.__contains__

    def admission(self) -> Admission:
        """Returns which ready tasks may be launched now."""
        free = self.limit - self.num_in_flight
        if free > 1:
            return Open.ALL
        if free < 1:
            return Open.ADMITTED
        lowest = self._unfinished.lowest
        return Open.ALL if lowest in self._begun else Lowest(lowest)

    def launched(self, task: Task) -> None:
        """Takes a slot for the first task of a microbatch, frees it at the last."""
        if task.microbatch not in self._begun:
            self._begun.add(task.microbatch)
            self.num_in_flight += 1
        if self._unfinished.launched(task):
            self.num_in_flight -= 1


class OneByOne:
    """Bounds forwards minus backwards; then completes the lowest microbatch."""

    def __init__(self, graph: PipelineGraph, rank: int, limit: int) -> None:
        self.limit = check_limit(limit)
        self._graph, self._rank = graph, rank
        self._unfinished = _Countdown(graph, rank)
        self._pending = 0  # launched forwards whose backward was not launched
        self._launched: dict[int, set[Task]] = collections.defaultdict(set)

    def has_begun(self, microbatch: int) -> bool:
        """Whether a task of `microbatch` was launched here."""
        return microbatch in self._launched

    def admission(self) -> Admission:
        """Returns which ready tasks may be launched now."""
        if self._pending < self.limit:
            return Open.ALL
        lowest = self._unfinished.lowest
        forward, backward = self._graph.local_order(lowest, self._rank)
        done = self._launched.get(lowest, ())
        return Only(next(task for task in forward + backward if task not in done))

    def launched(self, task: Task) -> None:
        """Counts the forward or backward."""
        self._unfinished.launched(task)
        self._launched[task.microbatch].add(task)
        if self._graph.route(task.microbatch).has_backward[task.stage]:
            self._pending += 1 if task.kind is Kind.F else -1


class _Countdown:
    """Counts down the tasks left of each microbatch on a rank.

    Attributes:
      lowest: the lowest microbatch with a task left; -1 when there is none.
    """

    def __init__(self, graph: PipelineGraph, rank: int) -> None:
        self._left = {
            j: count
            for j in range(graph.num_microbatches)
            if (count := graph.route(j).num_tasks[rank])
        }
        self._ascending: Iterable[int] = iter(tuple(self._left))
        self.lowest = next(iter(self._left), -1)

    def launched(self, task: Task) -> bool:
        """Counts `task`; returns whether it was the last of its microbatch."""
        j = task.microbatch
        self._left[j] -= 1
        if self._left[j]:
            return False
        del self._left[j]
        if j == self.lowest:
            self.lowest = next((k for k in self._ascending if k in self._left), -1)
        return True


def check_limit(limit: int) -> int:
    """Returns `limit`.

    Raises:
      ConfigError: it is below 1.
    """
    if limit < 1:
        raise ConfigError(
            f"pipeline.in_flight_limit={limit} lets no microbatch start.\n"
            "  Set --config.pipeline.in_flight_limit to 1 or more."
        )
    return limit
