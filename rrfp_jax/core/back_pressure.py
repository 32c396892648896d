"""The limits of a rank: which ready tasks are withheld, and why nothing stalls.

A microbatch is *in flight* on a rank from its first launched task there until its last.
Each rule bounds one thing, and a task is launched only if all rules admit it:

* `InFlight`, the default, bounds the microbatches in flight. Whatever an admitted
  microbatch still needs here is always admissible; a new microbatch needs a free slot,
  and the last slot is reserved for the *lowest* microbatch: the lowest with a forward
  or backward left here. So the bound is exact, also with several stages on a rank.
* `OneByOne` is the paper's (RRFP §5, Appendix C): it counts forwards minus backwards.
  At the limit, a rank leaves readiness-first mode and takes only the next local task of
  the lowest microbatch, in the strict order F ascending, B descending. With C stages on
  the rank it may overshoot by C.
* `QueuedWeights` bounds the weight gradients that wait: backwards less Ws launched.
* `core.memory.ResidualBytes` bounds bytes.

Why nothing can stall, for any DAG, placement, hint and limits: let j be the lowest
microbatch with a forward or backward left anywhere. On every rank where it has one it
is the lowest there, and every rule admits its next one, or there are weight gradients
to run first. Those are always admitted; the next one of each stage is ready, since all
microbatches below j have had their backwards. So something runs, is in transit, or is
ready and admissible on a rank that becomes free. A naive cap on forwards has no such j:
two towers may admit different microbatches and wait for each other at the join, and on
an interleaved placement admitted microbatches may lack the slots for their own later
chunks.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import Protocol

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError


class RankProgress:
    """How far each microbatch is on a rank.

    Attributes:
      begun: microbatches of which a task was launched here.
      left: tasks left here of each microbatch that has some, ascending.
      num_in_flight: microbatches that have begun and have a task left here.
      lowest: the lowest microbatch with a forward or backward left here; -1 for none.
    """

    def __init__(self, graph: PipelineGraph, rank: int) -> None:
        self.begun: set[int] = set()
        self.num_in_flight = 0
        stages = graph.stages_of[rank]
        self.left: dict[int, int] = {}
        self._chain: dict[int, int] = {}  # without Ws; all and only where some are left
        for j in range(graph.num_microbatches):
            route = graph.route(j)
            if count := route.num_tasks[rank]:
                self.left[j] = count
                self._chain[j] = count - sum(route.has_weight[s] for s in stages)
        self._ascending: Iterable[int] = iter(tuple(self._chain))
        self.lowest = next(iter(self._chain), -1)

    def launched(self, task: Task) -> None:
        """Counts `task`."""
        j = task.microbatch
        if j not in self.begun:
            self.begun.add(j)
            self.num_in_flight += 1
        self.left[j] -= 1
        if not self.left[j]:
            del self.left[j]
            self.num_in_flight -= 1
        if task.kind is Kind.W:
            return
        self._chain[j] -= 1
        if not self._chain[j]:
            del self._chain[j]
            if j == self.lowest:
                rest = (k for k in self._ascending if k in self._chain)
                self.lowest = next(rest, -1)


class Rule(Protocol):
    """One bound on what a rank launches."""

    def admits(self, task: Task) -> bool:
        """Whether the ready `task` may be launched now."""
        ...

    def launched(self, task: Task) -> None:
        """Learns that `task` was launched, after `RankProgress` has."""
        ...

    def __str__(self) -> str:
        """Returns name and value of the bound."""
        ...


class BackPressure:
    """The rules of one rank.

    Args:
      progress: of the rank; shared with its rules, and moved on here.
      rules: all must admit a task.
    """

    def __init__(self, progress: RankProgress, rules: Sequence[Rule]) -> None:
        self.progress = progress
        self._rules = rules
        if len(rules) == 1:
            self.admits = rules[0].admits  # type: ignore[method-assign]  # the usual case

    def admits(self, task: Task) -> bool:
        """Whether the ready `task` may be launched now."""
        return all(rule.admits(task) for rule in self._rules)

    def launched(self, task: Task) -> None:
        """Learns that `task` was launched."""
        self.progress.launched(task)
        for rule in self._rules:
            rule.launched(task)

    def why_held(self, task: Task) -> str:
        """Names the rules that refuse `task`, or stand for all where none does."""
        refusing = [rule for rule in self._rules if not rule.admits(task)]
        return ", ".join(map(str, refusing or self._rules))


class InFlight:
    """Bounds the microbatches in flight, exactly; reserves the last slot."""

    def __init__(self, progress: RankProgress, limit: int) -> None:
        self._limit = check_limit("in_flight_limit", limit)
        self._progress = progress
        self._begun = progress.begun

    def __str__(self) -> str:
        return f"limit={self._limit}"

    def admits(self, task: Task) -> bool:
        """Whether the microbatch has begun, or a slot is free for it."""
        if task.kind is not Kind.F or task.microbatch in self._begun:
            return True
        free = self._limit - self._progress.num_in_flight
        if free != 1:
            return free > 1
        lowest = self._progress.lowest
        return task.microbatch == lowest or lowest in self._begun

    def launched(self, task: Task) -> None:
        """`RankProgress` counts."""


class OneByOne:
    """Bounds forwards minus backwards; then completes the lowest microbatch."""

    def __init__(
        self, progress: RankProgress, limit: int, graph: PipelineGraph, rank: int
    ) -> None:
        self._limit = check_limit("in_flight_limit", limit)
        self._graph, self._rank = graph, rank
        self._progress = progress
        self._pending = 0  # launched forwards whose backward was not launched
        self._launched: dict[int, set[Task]] = collections.defaultdict(set)

    def __str__(self) -> str:
        return f"limit={self._limit}"

    def admits(self, task: Task) -> bool:
        """Whether there is room, or `task` is the next in the strict order."""
        if self._pending < self._limit or task.kind is Kind.W:
            return True
        if task.microbatch != self._progress.lowest:
            return False
        done = self._launched.get(task.microbatch, ())
        forward, backward = self._graph.local_order(task.microbatch, self._rank)
        left = (t for t in forward + backward if t.kind is not Kind.W and t not in done)
        return task == next(left)

    def launched(self, task: Task) -> None:
        """Counts the forward or backward."""
        if task.kind is Kind.W:
            return
        self._launched[task.microbatch].add(task)
        if self._graph.route(task.microbatch).has_backward[task.stage]:
            self._pending += 1 if task.kind is Kind.F else -1


class QueuedWeights:
    """Bounds the weight gradients that wait, exactly.

    Where they are committed in order, those in the queue may have to wait for one that
    is not, so the last place is reserved for the lowest microbatch.
    """

    def __init__(
        self, progress: RankProgress, limit: int, graph: PipelineGraph
    ) -> None:
        self._limit = check_limit("weight_limit", limit)
        self._progress = progress
        self._graph = graph
        self._num_queued = 0

    def __str__(self) -> str:
        return f"weight_limit={self._limit}"

    def admits(self, task: Task) -> bool:
        """Whether the W of a backward finds a place."""
        if task.kind is not Kind.B or not self._has_weight(task):
            return True
        free = self._limit - self._num_queued
        if free == 1 and self._graph.in_order:
            return task.microbatch == self._progress.lowest
        return free > 0

    def launched(self, task: Task) -> None:
        """Queues the W of a backward; takes out the W that was launched."""
        if task.kind is Kind.W:
            self._num_queued -= 1
        elif task.kind is Kind.B and self._has_weight(task):
            self._num_queued += 1

    def _has_weight(self, task: Task) -> bool:
        return self._graph.route(task.microbatch).has_weight[task.stage]


def check_limit(name: str, limit: int) -> int:
    """Returns `limit`.

    Raises:
      ConfigError: it is below 1.
    """
    if limit < 1:
        raise ConfigError(
            f"pipeline.{name}={limit} lets no microbatch start.\n"
            f"  Set --config.pipeline.{name} to 1 or more."
        )
    return limit
