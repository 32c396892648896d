"""Arbiters: what a free rank launches next.

`ReadinessFirst` is RRFP: some ready task, always, unless back-pressure withholds it.
`FixedOrder` is the baseline that every other system runs: it returns nothing, although
work is ready, until the next task of its order is. Nothing else may do that.
"""

from collections.abc import Sequence
from typing import Protocol

from rrfp_jax.core import back_pressure, ready_set
from rrfp_jax.core.hints import Hint
from rrfp_jax.core.task import Kind, Task


class Arbiter(Protocol):
    """Chooses among the ready tasks of one rank."""

    def add(self, task: Task) -> None:
        """Learns that `task` is ready."""
        ...

    def take(self) -> Task | None:
        """Removes and returns the task to launch now; None to wait."""
        ...

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready and not taken."""
        ...

    def why_held(self, task: Task) -> str:
        """Says why the ready `task` is not taken."""
        ...


class ReadinessFirst:
    """Takes the ready, admissible task that the hint ranks first."""

    def __init__(
        self,
        stages: Sequence[int],
        hint: Hint,
        pressure: back_pressure.BackPressure,
    ) -> None:
        self._hint = hint
        self._pressure = pressure
        self._ready = ready_set.ReadySet(stages, hint.key, pressure)
        self.add = self._ready.add

    def take(self) -> Task | None:
        """Removes and returns the best task, if there is one."""
        if not len(self._ready):  # most calls of a step
            return None
        task = self._hint.choose(self._ready)
        if task is not None:
            self._ready.launched(task)
            self._hint.launched(task)
        return task

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready and not taken."""
        return list(self._ready)

    def why_held(self, task: Task) -> str:
        """Names the limits that hold it; nothing else can hold a ready task."""
        return f"{task} held by back-pressure ({self._pressure.why_held(task)})"


class _InOrder:
    """What arbiters share that wait for the next task of an order."""

    def __init__(self, order: Sequence[Task]) -> None:
        self._order = order
        self._next = 0
        self._ready: set[Task] = set()
        self.add = self._ready.add

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready and not taken."""
        return sorted(self._ready)

    def why_held(self, task: Task) -> str:
        """Names the task that the order waits for."""
        return f"{task} held by the order, which waits for {self._order[self._next]}"


class FixedOrder(_InOrder):
    """Takes the tasks of an order one after another, waiting for each."""

    def take(self) -> Task | None:
        """Removes and returns the next task of the order, once it is ready."""
        if self._next == len(self._order) or self._order[self._next] not in self._ready:
            return None
        task = self._order[self._next]
        self._next += 1
        self._ready.remove(task)
        return task


class Opportunistic(_InOrder):
    """Varuna's order: fixed, but a late gradient lets the next forward go ahead.

    When the next task is a backward that is not ready, the earliest forward that is
    left in the order is taken if it is ready and fewer than `limit` forwards are
    without their backward.

    Source: Varuna, EuroSys 2022, §3.2 (arXiv:2111.04007).
    """

    def __init__(self, order: Sequence[Task], limit: int) -> None:
        super().__init__(order)
        self._forwards = [task for task in order if task.kind is Kind.F]
        self._paired = {(t.stage, t.microbatch) for t in order if t.kind is Kind.B}
        self._next_forward = 0
        self._pending = 0
        self._limit = back_pressure.check_limit("in_flight_limit", limit)
        self._taken: set[Task] = set()

    def take(self) -> Task | None:
        """Removes and returns the next task, or the next forward in its stead."""
        while self._next < len(self._order) and self._order[self._next] in self._taken:
            self._next += 1
        if self._next == len(self._order):
            return None
        task = self._order[self._next]
        if task in self._ready:
            return self._launch(task)
        if self._pending >= self._limit:
            return None
        while self._next_forward < len(self._forwards):
            forward = self._forwards[self._next_forward]
            if forward not in self._taken:
                return self._launch(forward) if forward in self._ready else None
            self._next_forward += 1
        return None

    def _launch(self, task: Task) -> Task:
        self._ready.remove(task)
        self._taken.add(task)
        if task.kind is not Kind.W and task[1:] in self._paired:
            self._pending += 1 if task.kind is Kind.F else -1
        return task
