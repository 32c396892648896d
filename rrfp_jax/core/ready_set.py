"""The ready tasks of one rank, in the order of a hint, behind back-pressure.

Adding, removing and looking at the best task cost O(log n). Three heaps: backwards,
forwards of microbatches that have begun here, and forwards of new ones. What was
launched stays in a heap until it comes to its top (lazy deletion).
"""

import heapq
from collections.abc import Callable, Iterator

from rrfp_jax.core import back_pressure
from rrfp_jax.core.hints import Key
from rrfp_jax.core.task import Kind, Task

_Heap = list[tuple[Key, Task]]


class ReadySet:
    """Holds all and only the tasks of a rank whose inputs are here, until launched."""

    def __init__(
        self, key: Callable[[Task], Key], pressure: back_pressure.BackPressure
    ) -> None:
        self._key = key
        self._pressure = pressure
        self._backward: _Heap = []
        self._begun: _Heap = []  # forwards of microbatches that have begun
        self._new: _Heap = []  # other forwards, and stale entries
        # The live entries of `_new`, by microbatch.
        self._new_of: dict[int, list[Task]] = {}
        self._live: set[Task] = set()

    def __contains__(self, task: Task) -> bool:
        return task in self._live

    def __iter__(self) -> Iterator[Task]:
        return iter(sorted(self._live))

    def __len__(self) -> int:
        return len(self._live)

    def add(self, task: Task) -> None:
        """Takes in a task whose inputs are all here."""
        self._live.add(task)
        if task.kind is Kind.B:
            heap = self._backward
        elif self._pressure.has_begun(task.microbatch):
            heap = self._begun
        else:
            heap = self._new
            self._new_of.setdefault(task.microbatch, []).append(task)
        heapq.heappush(heap, (self._key(task), task))

    def launched(self, task: Task) -> None:
        """Removes `task`; what else is ready of its microbatch has begun with it."""
        self._live.remove(task)
        self._pressure.launched(task)
        for other in self._new_of.pop(task.microbatch, ()):
            if other in self._live:
                heapq.heappush(self._begun, (self._key(other), other))

    def first(self, kind: Kind) -> Task | None:
        """Returns the admissible task of `kind` with the smallest key, if any."""
        admission = self._pressure.admission()
        if isinstance(admission, back_pressure.Only):
            task = admission.task
            return task if task.kind is kind and task in self._live else None
        if kind is Kind.B:
            return self._top(self._backward)
        begun = self._top(self._begun)
        if admission is back_pressure.Open.ADMITTED:
            return begun
        if admission is back_pressure.Open.ALL:
            new = self._top(self._new)
        else:
            ready = self._new_of.get(admission.microbatch, ())
            new = min(ready, key=self._key, default=None)
        if begun is None or new is None:
            return begun or new
        return min(begun, new, key=self._key)

    def _top(self, heap: _Heap) -> Task | None:
        while heap:
            if heap[0][1] in self._live:
                return heap[0][1]
            heapq.heappop(heap)
        return None
