"""The ready tasks of one rank, in the order of a hint, behind back-pressure.

Adding a task and finding the best one cost O(log n). There is a heap for each kind and
stage, and forwards of microbatches that have begun here are kept apart from new ones:
what back-pressure says of the first of a heap it says of the rest of it, but for the
lowest microbatch, which is looked at separately. What was launched stays in a heap
until it comes to its top (lazy deletion).
"""

import heapq
from collections.abc import Callable, Iterator, Sequence

from rrfp_jax.core.back_pressure import BackPressure
from rrfp_jax.core.hints import Key
from rrfp_jax.core.task import Kind, Task

_Heap = list[tuple[Key, Task]]


class ReadySet:
    """Holds all and only the tasks of a rank whose inputs are here, until launched.

    Args:
      stages: of the rank.
      key: ranks tasks of one kind, the smallest first.
      pressure: of the rank.
    """

    def __init__(
        self, stages: Sequence[int], key: Callable[[Task], Key], pressure: BackPressure
    ) -> None:
        self._stages = stages
        self._key = key
        self._pressure = pressure
        self._begun = pressure.progress.begun
        self._heaps: dict[tuple[Kind, int], _Heap] = {
            (kind, s): [] for kind in Kind for s in stages
        }
        self._new: dict[int, _Heap] = {s: [] for s in stages}
        # By kind, all its heaps; forwards of begun microbatches before new ones.
        self._of_kind = {
            kind: [self._heaps[kind, s] for s in stages]
            + [self._new[s] for s in stages if kind is Kind.F]
            for kind in Kind
        }
        # Live forwards of microbatches that have not begun.
        self._new_of: dict[int, list[Task]] = {}
        self._live: set[Task] = set()
        self._counts = dict.fromkeys(Kind, 0)

    def __contains__(self, task: Task) -> bool:
        return task in self._live

    def __iter__(self) -> Iterator[Task]:
        return iter(sorted(self._live))

    def __len__(self) -> int:
        return len(self._live)

    def add(self, task: Task) -> None:
        """Takes in a task whose inputs are all here."""
        self._live.add(task)
        kind, stage, j = task
        self._counts[kind] += 1
        if kind is Kind.F and j not in self._begun:
            heap = self._new[stage]
            self._new_of.setdefault(j, []).append(task)
        else:
            heap = self._heaps[kind, stage]
        heapq.heappush(heap, (self._key(task), task))

    def launched(self, task: Task) -> None:
        """Removes `task`; what else is ready of its microbatch has begun with it."""
        self._live.remove(task)
        self._counts[task.kind] -= 1
        self._pressure.launched(task)
        for other in self._new_of.pop(task.microbatch, ()):
            if other in self._live:
                heap = self._heaps[Kind.F, other.stage]
                heapq.heappush(heap, (self._key(other), other))

    def count(self, kind: Kind) -> int:
        """Returns the number of ready tasks of `kind`, admissible or not."""
        return self._counts[kind]

    def first(self, kind: Kind) -> Task | None:
        """Returns the admissible task of `kind` with the smallest key, if any."""
        live, admits = self._live, self._pressure.admits
        best: tuple[Key, Task] | None = None
        is_held = False
        for heap in self._of_kind[kind]:
            while heap and heap[0][1] not in live:
                heapq.heappop(heap)
            if heap and (best is None or heap[0] < best):
                if admits(heap[0][1]):
                    best = heap[0]
                else:
                    is_held = True
        if is_held:
            best = self._with_lowest(kind, best)
        return best and best[1]

    def _with_lowest(
        self, kind: Kind, best: tuple[Key, Task] | None
    ) -> tuple[Key, Task] | None:
        """Returns the better of `best` and what is admissible of the lowest."""
        for stage in self._stages:
            task = Task(kind, stage, self._pressure.progress.lowest)
            if task in self._live and self._pressure.admits(task):
                entry = (self._key(task), task)
                best = entry if best is None else min(best, entry)
        return best
