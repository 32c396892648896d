"""Hints: non-binding orders that rank the tasks that are ready (RRFP §5, §7.2).

A hint never waits. It is asked only among tasks whose inputs are here and which
back-pressure admits, and whenever there is one it names one. An instance belongs to
one rank, since some hints have state.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from rrfp_jax.core.task import Kind, Task

Key = tuple[int, int]
KeyFunction = Callable[[Task], Key]

_OPPOSITE = {Kind.F: Kind.B, Kind.B: Kind.F}


class Ready(Protocol):
    """The ready tasks of a rank, as a hint sees them."""

    def first(self, kind: Kind) -> Task | None:
        """Returns the admissible ready task of `kind` with the smallest key."""
        ...

    def count(self, kind: Kind) -> int:
        """Returns the number of ready tasks of `kind`, admissible or not."""
        ...


class Hint(Protocol):
    """Ranks ready tasks. Must choose a task whenever `ready` offers one."""

    def key(self, task: Task) -> Key:
        """Ranks `task` among the tasks of its kind; the smallest first. Constant."""
        ...

    def choose(self, ready: Ready) -> Task | None:
        """Returns the best ready task; None only if there is none. Does not change."""
        ...

    def launched(self, task: Task) -> None:
        """Learns that `task` was launched."""
        ...


def early_first(task: Task) -> Key:
    """Ranks within a kind as RRFP §5: forwards by ascending, backwards by descending
    stage; ties by ascending microbatch. Weight gradients by microbatch, then as
    backwards: roughly in the order in which they queue up.
    """
    match task.kind:
        case Kind.F:
            return task.stage, task.microbatch
        case Kind.B:
            return -task.stage, task.microbatch
        case Kind.W:
            return task.microbatch, -task.stage


def late_first(task: Task) -> Key:
    """Ranks as `early_first`, but forwards by descending stage.

    A microbatch that is half through is finished before a new one begins, so a rank
    with several stages holds fewer at once.
    """
    key = early_first(task)
    return (-task.stage, task.microbatch) if task.kind is Kind.F else key


class Alternating:
    """BF, FB and BFW: one ready task of one direction, then one of the other (RRFP §5).

    A round is one ready task of `first`, if any, then one ready task of the other
    direction, if any. A direction with nothing ready is passed over at once. So the
    turn is always the opposite of what was launched last, and depends on launches only:
    every process that launches the same sequence is at the same turn. It follows that
    BF and FB can differ only in the first launch of a rank.

    Weight gradients are *filler* while few of them are ready: run when neither
    direction has anything ready. Once `urgent` are, they come first: with 1, at once,
    as if the backward were whole (BF, FB). Where they are never urgent, a new round
    begins after each (BFW).

    Args:
      first: the direction that a round begins with.
      urgent: how many ready weight gradients come first; None for no number.
      key: ranks the tasks of a kind.
    """

    def __init__(
        self, first: Kind, urgent: int | None = 1, key: KeyFunction = early_first
    ) -> None:
        self._first = first
        self._turn = first  # the direction that the current round asks for next
        self._urgent = urgent
        self.key = key

    def choose(self, ready: Ready) -> Task | None:
        """Returns a task of the direction whose turn it is, else of the other."""
        if self._urgent is not None and ready.count(Kind.W) >= self._urgent:
            return ready.first(Kind.W)
        return (
            ready.first(self._turn)
            or ready.first(_OPPOSITE[self._turn])
            or ready.first(Kind.W)
        )

    def launched(self, task: Task) -> None:
        """Passes the turn on."""
        if task.kind is not Kind.W:
            self._turn = _OPPOSITE[task.kind]
        elif self._urgent is None:
            self._turn = self._first


class Priority:
    """A task of the first of `kinds` that has one ready (RRFP §7.7).

    Args:
      kinds: F, B and W, the best first.
      key: ranks the tasks of a kind.
    """

    def __init__(self, kinds: Sequence[Kind], key: KeyFunction = early_first) -> None:
        self._kinds = tuple(kinds)
        self.key = key

    def choose(self, ready: Ready) -> Task | None:
        """Returns the first ready task of the best kind that has one."""
        for kind in self._kinds:
            if (task := ready.first(kind)) is not None:
                return task
        return None

    def launched(self, task: Task) -> None:
        """Nothing to remember."""


class Ordered:
    """Ranks by position in an order: the earliest task of it that is ready.

    Where a fixed order would wait for its next task, this takes the next one that can
    run, so any order at all finishes, 1F1B and GPipe as well as a shuffled one.
    """

    def __init__(self, order: Sequence[Task]) -> None:
        self._position = {task: i for i, task in enumerate(order)}

    def key(self, task: Task) -> Key:
        """Ranks by position."""
        return self._position[task], 0

    def choose(self, ready: Ready) -> Task | None:
        """Returns the ready task that comes first in the order."""
        heads: Iterable[Task | None] = map(ready.first, Kind)
        return min((t for t in heads if t is not None), key=self.key, default=None)

    def launched(self, task: Task) -> None:
        """Nothing to remember."""
