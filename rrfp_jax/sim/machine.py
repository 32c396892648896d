"""Virtual ranks and links: what occupies what, and until when.

A machine is told to launch and to send, as devices are, and says which events are due
and when. The simulator moves its clock from one due event to the next; the runtime's
emulated devices wait until they are due. Both so stand on the same arithmetic.

`Overlapped`: a link carries one payload after another, beside the ranks' computing.
`Blocking`: a transfer occupies both ranks, as a blocking send and receive do, which is
how classic 1F1B systems ship activations.
"""

import collections
import heapq
from collections.abc import Collection
from typing import Protocol

from rrfp_jax.core.events import Arrived, Event, Finished
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Span, Told, Trace, Transfer
from rrfp_jax.errors import InvariantError
from rrfp_jax.sim.costs import CostTable, applied_to

# Among events of one instant, what becomes known goes before what frees a rank, so that
# a rank that becomes free sees all that is ready by then.
_ARRIVED, _FINISHED = 0, 1
_Due = tuple[float, int, int, int, Event]


class Machine(Protocol):
    """Ranks that run launched tasks in order, and links between them.

    Attributes:
      trace: the spans and transfers begun so far.
    """

    trace: Trace

    def launch(self, task: Task, now_s: float) -> None:
        """Queues `task` on its rank."""
        ...

    def send(self, source: Task, to: int, now_s: float) -> float | None:
        """Queues the output of `source`, launched just now, for stage `to`.

        Returns:
          When it arrives, if the receiver's rank is on another machine, which has to be
          told; else None.
        """
        ...

    def expect(self, source: Task, to: int, due_s: float) -> None:
        """Learns what arrives from another machine, and when."""
        ...

    def next_due_s(self) -> float | None:
        """Returns when something ends next; None if nothing is under way."""
        ...

    def pop(self, until_s: float) -> Told | None:
        """Removes and returns the next event, if one is due by `until_s`."""
        ...


class Overlapped:
    """Links that work beside the ranks: all that is launched can be timed at once.

    Args:
      graph: the tasks.
      costs: how long they take.
      ranks: those of this machine; None for all. What they send to other ranks takes
        its time on links of this machine, and arrives at another one.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        costs: CostTable,
        ranks: Collection[int] | None = None,
    ) -> None:
        self.trace = Trace(graph)
        self._ranks = range(graph.num_ranks) if ranks is None else ranks
        self._placement = graph.placement
        self._costs = applied_to(costs, graph)
        self._due: list[_Due] = []
        self._count = 0  # breaks ties in the order of launches
        self._rank_free_s = [0.0] * graph.num_ranks
        self._link_free_s: dict[tuple[int, int], float] = {}

    def launch(self, task: Task, now_s: float) -> None:
        """Queues `task` behind what its rank was given before."""
        rank = self._placement[task.stage]
        start_s = max(now_s, self._rank_free_s[rank])
        end_s = start_s + self._costs.compute_s(task)
        self._rank_free_s[rank] = end_s
        self.trace.spans.append(Span(task, rank, start_s, end_s))
        self._count += 1
        event = Finished(task)
        heapq.heappush(self._due, (end_s, _FINISHED, self._count, rank, event))

    def send(self, source: Task, to: int, now_s: float) -> float | None:
        """Queues the payload on its link, for when the rank's last launch ends."""
        del now_s
        sender, receiver = self._placement[source.stage], self._placement[to]
        link = (sender, receiver)
        exists_s = self._rank_free_s[sender]
        start_s = max(exists_s, self._link_free_s.get(link, 0.0))
        end_s = start_s + self._costs.transfer_s(source, to)
        self._link_free_s[link] = end_s
        self.trace.transfers.append(Transfer(source, to, start_s, end_s))
        if receiver not in self._ranks:
            return end_s
        self.expect(source, to, end_s)
        return None

    def expect(self, source: Task, to: int, due_s: float) -> None:
        """Queues an arrival."""
        self._count += 1
        event = Arrived(source, to)
        rank = self._placement[to]
        heapq.heappush(self._due, (due_s, _ARRIVED, self._count, rank, event))

    def next_due_s(self) -> float | None:
        """Returns when something ends next; None if nothing is under way."""
        return self._due[0][0] if self._due else None

    def pop(self, until_s: float) -> Told | None:
        """Removes and returns the next event, if one is due by `until_s`."""
        if not self._due or self._due[0][0] > until_s:
            return None
        time_s, _, _, rank, event = heapq.heappop(self._due)
        return Told(time_s, rank, event)


class Blocking:
    """Transfers that occupy sender and receiver.

    After its compute, a task's rank waits until each of its sends is done; only then it
    is free. A transfer begins when neither rank computes or transfers: a rank that
    waits with a send of its own can receive meanwhile, so two neighbours that send to
    each other take turns and nothing can lock up. The oldest transfer goes first.
    """

    def __init__(self, graph: PipelineGraph, costs: CostTable) -> None:
        self.trace = Trace(graph)
        self._placement = graph.placement
        self._costs = applied_to(costs, graph)
        self._due: list[_Due] = []
        self._internal: list[tuple[float, int, int, Task | None, Transfer | None]] = []
        self._count = 0
        self._queue: list[collections.deque[tuple[Task, list[int]]]] = [
            collections.deque() for _ in range(graph.num_ranks)
        ]
        self._busy = [False] * graph.num_ranks
        self._computed: set[Task] = set()  # whose sends are under way
        self._waiting: list[tuple[Task, int]] = []  # sends, oldest first

    def launch(self, task: Task, now_s: float) -> None:
        """Queues `task` behind what its rank was given before, sends included."""
        self._queue[self._placement[task.stage]].append((task, []))
        self._settle(now_s)

    def send(self, source: Task, to: int, now_s: float) -> float | None:
        """Queues the payload behind the compute of `source`."""
        del now_s
        self._queue[self._placement[source.stage]][-1][1].append(to)
        return None

    def expect(self, source: Task, to: int, due_s: float) -> None:
        """Refuses: a transfer here needs both its ranks."""
        raise InvariantError(f"{source} for {to} comes from another machine ({due_s}).")

    def next_due_s(self) -> float | None:
        """Returns when something ends next; None if nothing is under way."""
        heads = [heap[0][0] for heap in (self._due, self._internal) if heap]
        return min(heads, default=None)

    def pop(self, until_s: float) -> Told | None:
        """Removes and returns the next event, if one is due by `until_s`."""
        while not self._due and self._internal and self._internal[0][0] <= until_s:
            self._advance()
        if not self._due or self._due[0][0] > until_s:
            return None
        time_s, _, _, rank, event = heapq.heappop(self._due)
        return Told(time_s, rank, event)

    def _advance(self) -> None:
        """Ends the compute or transfer that ends next."""
        now_s, _, _, computed, moved = heapq.heappop(self._internal)
        if computed is not None:
            self._busy[self._placement[computed.stage]] = False
            self._computed.add(computed)
            self._after_compute(computed, now_s)
        elif moved is not None:
            sender, receiver = self._ranks(moved.source, moved.to)
            self._busy[sender] = self._busy[receiver] = False
            self._post(now_s, _ARRIVED, receiver, Arrived(moved.source, moved.to))
            self._queue[sender][0][1].remove(moved.to)
            self._after_compute(moved.source, now_s)
        self._settle(now_s)

    def _after_compute(self, task: Task, now_s: float) -> None:
        """Asks for the next send of `task`, or frees its rank."""
        rank = self._placement[task.stage]
        sends = self._queue[rank][0][1]
        if sends:
            self._waiting.append((task, sends[0]))
            return
        self._queue[rank].popleft()
        self._post(now_s, _FINISHED, rank, Finished(task))

    def _settle(self, now_s: float) -> None:
        """Begins every transfer, then every compute, whose ranks are free."""
        for source, to in tuple(self._waiting):
            sender, receiver = self._ranks(source, to)
            if self._busy[sender] or self._busy[receiver]:
                continue
            self._waiting.remove((source, to))
            self._busy[sender] = self._busy[receiver] = True
            end_s = now_s + self._costs.transfer_s(source, to)
            transfer = Transfer(source, to, now_s, end_s)
            self.trace.transfers.append(transfer)
            self._later(end_s, None, transfer)
        for rank, queue in enumerate(self._queue):
            if queue and not self._busy[rank] and queue[0][0] not in self._computed:
                task = queue[0][0]
                self._busy[rank] = True
                end_s = now_s + self._costs.compute_s(task)
                self.trace.spans.append(Span(task, rank, now_s, end_s))
                self._later(end_s, task, None)

    def _ranks(self, source: Task, to: int) -> tuple[int, int]:
        return self._placement[source.stage], self._placement[to]

    def _later(self, end_s: float, task: Task | None, moved: Transfer | None) -> None:
        self._count += 1
        order = _FINISHED if moved is None else _ARRIVED
        heapq.heappush(self._internal, (end_s, order, self._count, task, moved))

    def _post(self, now_s: float, order: int, rank: int, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._due, (now_s, order, self._count, rank, event))
