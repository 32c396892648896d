"""Hints: non-binding orders that rank the tasks that are ready (RRFP §5, §7.2).

A hint never waits. It is asked only among tasks whose inputs are here and which
back-pressure admits, and whenever there is one it names one. An instance belongs to
one rank, since some hints have state.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from rrfp_jax.core.task import Kind, Task

Key = tuple[int, int]

_OPPOSITE = {Kind.F: Kind.B, Kind.B: Kind.F}


class Ready(Protocol):
    """The ready tasks of a rank, as a hint sees them."""

    def first(self, kind: Kind) -> Task | None:
        """Returns the admissible ready task of `kind` with the smallest key."""
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


def chunk_key(task: Task) -> Key:
    """Ranks within a kind as RRFP §5: forwards by ascending, backwards by descending
    stage; ties by ascending microbatch.
    """
    stage = task.stage if task.kind is Kind.F else -task.stage
    return stage, task.microbatch


class Alternating:
    """BF and FB: one ready task of one direction, then one of the other (RRFP §5).

    A round is one ready task of `first`, if any, then one ready task of the other kind,
    if any. A direction with nothing ready is passed over at once. So the turn is always
    the opposite of what was launched last, and depends on launches only: every process
    that launches the same sequence is at the same turn. It follows that BF and FB can
    differ only in the first launch of a rank.
    """

    def __init__(self, first: Kind) -> None:
        self._turn = first  # the kind that the current round asks for next

    def key(self, task: Task) -> Key:
        """Ranks by chunk, then microbatch."""
        return chunk_key(task)

    def choose(self, ready: Ready) -> Task | None:
        """Returns a task of the kind whose turn it is, else of the other."""
        return ready.first(self._turn) or ready.first(_OPPOSITE[self._turn])

    def launched(self, task: Task) -> None:
        """Passes the turn on."""
        self._turn = _OPPOSITE[task.kind]


class Priority:
    """B- and F-priority: a task of `first` whenever one is ready (RRFP §7.7)."""

    def __init__(self, first: Kind) -> None:
        self._kinds = (first, _OPPOSITE[first])

    def key(self, task: Task) -> Key:
        """Ranks by chunk, then microbatch."""
        return chunk_key(task)

    def choose(self, ready: Ready) -> Task | None:
        """Returns the first ready task of the preferred kind, else of the other."""
        return ready.first(self._kinds[0]) or ready.first(self._kinds[1])

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
