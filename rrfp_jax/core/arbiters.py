"""Arbiters: what a free rank launches next.

`ReadinessFirst` is RRFP: some ready task, always, unless back-pressure withholds it.
`FixedOrder` is the baseline that every other system runs: it returns nothing, although
work is ready, until the next task of its order is. Nothing else may do that.

Choosing and launching are two steps, because where a rank spans several processes they
have to agree in between (`core.agreement`). Arbiters that got the same calls of `add`
and `launched` choose the same task, in whatever process they are.
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

    def choose(self) -> Task | None:
        """Returns the task to launch now; None to wait. Does not change."""
        ...

    def launched(self, task: Task) -> None:
        """Learns that the ready `task` was launched, be it the chosen one or not."""
        ...

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready and not launched."""
        ...

    def why_held(self, task: Task) -> str:
        """Says why the ready `task` is not launched."""
        ...


class ReadinessFirst:
    """Chooses the ready, admissible task that the hint ranks first."""

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

    def choose(self) -> Task | None:
        """Returns the best task, if there is one."""
        if not len(self._ready):  # most calls of a step
            return None
        return self._hint.choose(self._ready)

    def launched(self, task: Task) -> None:
        """Removes `task`, and moves back-pressure and hint on."""
        self._ready.launched(task)
        self._hint.launched(task)

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready and not launched."""
        return list(self._ready)

    def why_held(self, task: Task) -> str:
        """Names the limits that hold it; nothing else can hold a ready task."""
        return f"{task} held by back-pressure ({self._pressure.why_held(task)})"


class _InOrder:
    """What arbiters share that wait for the next task of an order."""

    def __init__(self, order: Sequence[Task]) -> None:
        self._order = order
        self._next = 0  # position of the first task that was not launched
        self._launched: set[Task] = set()
        self._ready: set[Task] = set()
        self.add = self._ready.add

    def launched(self, task: Task) -> None:
        """Removes `task`, and moves on to the first that is left of the order."""
        self._ready.remove(task)
        self._launched.add(task)
        self._next = _first_left(self._order, self._next, self._launched)

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready and not launched."""
        return sorted(self._ready)

    def why_held(self, task: Task) -> str:
        """Names the task that the order waits for."""
        return f"{task} held by the order, which waits for {self._order[self._next]}"


class FixedOrder(_InOrder):
    """Chooses the tasks of an order one after another, waiting for each."""

    def choose(self) -> Task | None:
        """Returns the next task of the order, once it is ready."""
        if self._next == len(self._order) or self._order[self._next] not in self._ready:
            return None
        return self._order[self._next]


class Opportunistic(_InOrder):
    """Varuna's order: fixed, but a late gradient lets the next forward go ahead.

    When the next task is a backward that is not ready, the earliest forward that is
    left in the order is chosen if it is ready and fewer than `limit` forwards are
    without their backward.

    Source: Varuna, EuroSys 2022, §3.2 (arXiv:2111.04007).
    """

    def __init__(self, order: Sequence[Task], limit: int) -> None:
        super().__init__(order)
        self._forwards = [task for task in order if task.kind is Kind.F]
        self._paired = {(t.stage, t.microbatch) for t in order if t.kind is Kind.B}
        self._next_forward = 0  # position of the first that was not launched
        self._pending = 0
        self._limit = back_pressure.check_limit("in_flight_limit", limit)

    def choose(self) -> Task | None:
        """Returns the next task, or the next forward in its stead."""
        if self._next == len(self._order):
            return None
        task = self._order[self._next]
        if task in self._ready:
            return task
        if self._pending >= self._limit or self._next_forward == len(self._forwards):
            return None
        forward = self._forwards[self._next_forward]
        return forward if forward in self._ready else None

    def launched(self, task: Task) -> None:
        """Removes `task`; counts forwards without their backward."""
        super().launched(task)
        if task.kind is Kind.F:
            self._next_forward = _first_left(
                self._forwards, self._next_forward, self._launched
            )
        if task.kind is not Kind.W and task[1:] in self._paired:
            self._pending += 1 if task.kind is Kind.F else -1


def _first_left(order: Sequence[Task], position: int, launched: set[Task]) -> int:
    """Returns the first position from `position` on whose task is not launched."""
    while position < len(order) and order[position] in launched:
        position += 1
    return position
