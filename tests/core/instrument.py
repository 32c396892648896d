"""An instrument for the laws of the core: dispatchers that check each other's promises.

`Watched` wraps a dispatcher and keeps an account of its own, made from the graph's
fields alone (edges, skipped, frozen) and from what it is told. After every event it
compares: each launch was due, within the limit, and nothing that could run was left
beside a free slot. Nothing here calls the precedence or admission code under test.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence

from rrfp_jax.core import events, graph, task
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.task import Kind, Task

t = task.parse


def ts(text: str) -> list[Task]:
    """Reads `"0F0 0B0"`."""
    return [t(word) for word in text.split()]


def needs(of: graph.PipelineGraph) -> dict[Task, set[Task]]:
    """Returns every task and its inputs, straight from the definitions."""
    found: dict[Task, set[Task]] = {}
    for j in range(of.num_microbatches):
        visited = [s for s in range(of.num_stages) if (s, j) not in of.skipped]
        edges = [(u, v) for u, v in of.edges if u in visited and v in visited]
        learning: set[int] = set()
        for s in visited:
            if s not in of.frozen or any(v == s and u in learning for u, v in edges):
                learning.add(s)
        for s in visited:
            found[Task(Kind.F, s, j)] = {Task(Kind.F, u, j) for u, v in edges if v == s}
        for s in learning:
            cotangents = {Task(Kind.B, v, j) for u, v in edges if u == s}
            found[Task(Kind.B, s, j)] = {Task(Kind.F, s, j)} | cotangents
            if of.is_split and s not in of.frozen:
                found[Task(Kind.W, s, j)] = {Task(Kind.B, s, j)}
                lower = [Task(Kind.W, s, k) for k in range(j)]
                if of.in_order:
                    before = [a for a in lower if a in found]
                    found[Task(Kind.W, s, j)] |= set(before[-1:])
    return found


class Account:
    """What one rank may do, by the rules alone.

    Attributes:
      launched: in order.
      running: launched and unfinished.
      arrived: (source, stage) pairs.
    """

    def __init__(self, of: graph.PipelineGraph, rank: int, limit: int) -> None:
        self.limit = limit
        self.is_in_order = of.in_order
        self._needs = needs(of)
        self.own = {a for a in self._needs if of.placement[a.stage] == rank}
        self.launched: list[Task] = []
        self.running: set[Task] = set()
        self.arrived: set[tuple[Task, int]] = set()
        self._placement = of.placement
        self._rank = rank

    def is_here(self, source: Task, to: int) -> bool:
        """Whether the output of `source` can be used by stage `to` on this rank."""
        if self._placement[source.stage] == self._rank:
            return source in self.launched
        return (source, to) in self.arrived

    def ready(self) -> list[Task]:
        """Returns the tasks whose inputs are here and that were not launched."""
        return [
            a
            for a in sorted(self.own - set(self.launched))
            if all(self.is_here(source, a.stage) for source in self._needs[a])
        ]

    def remote_targets(self, source: Task) -> set[int]:
        """Returns the stages on other ranks that need the output of `source`."""
        return {
            a.stage
            for a, needed in self._needs.items()
            if source in needed and self._placement[a.stage] != self._rank
        }

    def left(self) -> dict[int, int]:
        """Returns the number of tasks not launched, by microbatch that has some."""
        return collections.Counter(a.microbatch for a in self.own - set(self.launched))

    def in_flight(self) -> set[int]:
        """Returns the microbatches begun here that have a task left."""
        return {a.microbatch for a in self.launched} & set(self.left())

    def lowest(self) -> int:
        """Returns the lowest microbatch with an F or a B left; -1 for none."""
        left = self.own - set(self.launched)
        return min((a.microbatch for a in left if a.kind is not Kind.W), default=-1)

    def pending(self) -> int:
        """Returns forwards minus backwards, of stages that have a backward."""
        both = [
            a
            for a in self.launched
            if a.kind is not Kind.W and a._replace(kind=Kind.B) in self._needs
        ]
        return sum(1 if a.kind is Kind.F else -1 for a in both)

    def queued(self) -> int:
        """Returns how many weight gradients wait for their turn on the rank."""
        done = set(self.launched)
        waiting = self.own - done
        return sum(
            a.kind is Kind.W and a._replace(kind=Kind.B) in done for a in waiting
        )

    def next_in_strict_order(self) -> Task:
        """Returns the next F or B of the lowest microbatch, F up, B down."""
        lowest = self.lowest()
        mine = [
            a
            for a in self.own - set(self.launched)
            if a.microbatch == lowest and a.kind is not Kind.W
        ]
        return min(mine, key=_strict)


def _strict(a: Task) -> tuple[int, int]:
    return (0, a.stage) if a.kind is Kind.F else (1, -a.stage)


def reserving(account: Account, wanted: Task) -> bool:
    """Whether the reserving rule admits the ready task `wanted`."""
    begun = {a.microbatch for a in account.launched}
    free = account.limit - len(account.in_flight())
    lowest = account.lowest()
    if wanted.microbatch in begun or free > 1:
        return True
    return free == 1 and (wanted.microbatch == lowest or lowest in begun)


def one_by_one(account: Account, wanted: Task) -> bool:
    """Whether the paper's rule admits the ready task `wanted`."""
    at_limit = account.pending() >= account.limit
    if not at_limit or wanted.kind is Kind.W:
        return True
    return wanted == account.next_in_strict_order()


def within_weight_limit(account: Account, wanted: Task, limit: int) -> bool:
    """Whether a backward's weight gradient finds a place in the queue of `limit`."""
    if wanted.kind is not Kind.B or wanted._replace(kind=Kind.W) not in account.own:
        return True
    free = limit - account.queued()
    if free == 1 and account.is_in_order:
        return wanted.microbatch == account.lowest()
    return free > 0


def unbounded(account: Account, wanted: Task) -> bool:
    """Admits everything."""
    del account, wanted
    return True


@dataclasses.dataclass(frozen=True)
class Bytes:
    """A limit in bytes, and what tasks keep."""

    residuals: Residuals
    limit: int

    def held(self, account: Account, microbatch: int) -> int:
        """Returns what a microbatch holds on the rank."""
        mine = [a for a in account.launched if a.microbatch == microbatch]
        return sum(self.residuals.added(a) for a in mine)

    def rest(self, account: Account, microbatch: int) -> int:
        """Returns what it may still add: the most of each stage, less what it holds."""
        mine = {a for a in account.own if a.microbatch == microbatch}
        rest = 0
        for stage in {a.stage for a in mine}:
            done = {a.kind for a in account.launched if a[1:] == (stage, microbatch)}
            forward = self.residuals.num_bytes[Kind.F, stage][microbatch]
            most = self.residuals.most(stage, microbatch)
            if Kind.B not in done:
                rest += most - (forward if Kind.F in done else 0)
        return rest

    def is_safe(self, account: Account) -> bool:
        """Whether all can be completed in ascending order up to the last begun."""
        free = self.limit - sum(self.residuals.added(a) for a in account.launched)
        if free < 0:
            return False
        last = max((a.microbatch for a in account.launched), default=-1)
        for j in sorted(account.left()):
            if j <= last:
                if self.rest(account, j) > free:
                    return False
                free += self.held(account, j)
        return True


class Watched(Dispatcher):
    """A dispatcher that raises AssertionError at the first broken promise."""

    def __init__(
        self,
        inner: Dispatcher,
        of: graph.PipelineGraph,
        limit: int,
        admits: Callable[[Account, Task], bool],
        launch_ahead: int,
        weight_limit: int = 0,
        memory: Bytes | None = None,
    ) -> None:
        self.rank = inner.rank
        self.inner = inner
        self.account = Account(of, inner.rank, limit)
        self._rule = admits
        self._weight_limit = weight_limit
        self._memory = memory
        self._launch_ahead = launch_ahead
        self._num_stages_here = of.placement.count(inner.rank)

    @property
    def is_done(self) -> bool:
        """Whether both the dispatcher and the account say so, and agree."""
        mine = not self.account.left() and not self.account.running
        assert self.inner.is_done == mine
        return mine

    def explain(self) -> list[str]:
        """Returns what the dispatcher says."""
        return self.inner.explain()

    def handle(self, event: events.Event) -> list[events.Instruction]:
        """Passes the event on and checks the answer."""
        match event:
            case events.Finished(task=done):
                self.account.running.remove(done)
            case events.Arrived(source, to):
                self.account.arrived.add((source, to))
        instructions = self.inner.handle(event)
        rest = list(instructions)
        while rest:
            first = rest.pop(0)
            assert isinstance(first, events.Launch)
            self._check_launch(first.task)
            targets = self.account.remote_targets(first.task)
            sends = [rest.pop(0) for _ in targets]
            assert set(sends) == {events.Send(first.task, to) for to in targets}
        self._check_nothing_waits()
        return instructions

    def _check_launch(self, launched: Task) -> None:
        account = self.account
        assert launched in account.ready(), f"{launched} early, twice or elsewhere"
        assert self._admits(account, launched), f"{launched} is over the limit"
        assert len(account.running) < self._launch_ahead
        account.launched.append(launched)
        account.running.add(launched)
        if self._weight_limit:
            assert account.queued() <= self._weight_limit
        if self._memory and self._memory.residuals.added(launched) > 0:
            assert self._memory.is_safe(account), f"{launched} leads to no safe state"
        if self._rule is reserving:
            assert len(account.in_flight()) <= account.limit
        if self._rule is one_by_one:
            assert account.pending() <= account.limit + self._num_stages_here

    def _fits(self, wanted: Task) -> bool:
        assert self._memory
        added = self._memory.residuals.added
        total = sum(map(added, self.account.launched)) + added(wanted)
        return total <= self._memory.limit

    def _admits(self, account: Account, wanted: Task) -> bool:
        limit = self._weight_limit
        is_within = not limit or within_weight_limit(account, wanted, limit)
        return is_within and self._rule(account, wanted)

    def _check_nothing_waits(self) -> None:
        """A free slot and an admissible ready task never coexist."""
        if len(self.account.running) < self._launch_ahead:
            waiting = [a for a in self.account.ready() if self._admits(self.account, a)]
            if self._memory:  # a small one does not slip past a large one
                lowest = self.account.lowest()
                waiting = [
                    a for a in waiting if a.microbatch == lowest and self._fits(a)
                ]
            assert not waiting, f"rank {self.rank} is free and leaves {waiting}"


def launches(instructions: Sequence[events.Instruction]) -> list[Task]:
    """Returns the launched tasks."""
    return [i.task for i in instructions if isinstance(i, events.Launch)]
