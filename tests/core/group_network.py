"""Ranks of several processes in virtual time: who sees what when, and who says what.

Every member of every rank has a dispatcher and a device of its own. Inputs reach the
members of a rank at different times, and their messages take time and may overtake one
another. An account of its own, `instrument.Account`, says what each member may launch.
"""

import dataclasses
import heapq
import random
from collections.abc import Callable

from rrfp_jax.core import policies
from rrfp_jax.core.agreement import Group
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.events import (
    Arrived,
    Event,
    Finished,
    Launch,
    Propose,
    Proposed,
    Send,
    Started,
)
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Told
from tests.core import instrument


@dataclasses.dataclass(frozen=True)
class Delays:
    """How long everything takes.

    Attributes:
      compute_s: of a task at a member.
      arrival_s: from the end of a task at a member to its arrival at that of a stage.
      message_s: of the next message.
    """

    compute_s: Callable[[Task, int], float]
    arrival_s: Callable[[Task, int, int], float]
    message_s: Callable[[], float]


class Member:
    """One process of a rank, with a device that runs its launches in order.

    Attributes:
      ready_s: when each task became ready here.
      spans: (task, start, end) in launch order.
    """

    def __init__(self, index: int, dispatcher: Dispatcher, of: PipelineGraph) -> None:
        self.index = index
        self.dispatcher = dispatcher
        self.account = instrument.Account(of, dispatcher.rank, 0)
        self.ready_s: dict[Task, float] = {}
        self.spans: list[tuple[Task, float, float]] = []

    def run(self, task: Task, now_s: float, compute_s: float) -> float:
        """Queues a launched task; returns when it ends."""
        start_s = max(now_s, self.spans[-1][2]) if self.spans else now_s
        self.spans.append((task, start_s, start_s + compute_s))
        return start_s + compute_s


class Network:
    """Runs one step.

    Attributes:
      ranks: their members.
      logs: by member, what its dispatchers were told.
      num_rounds: by rank.
    """

    def __init__(
        self, of: PipelineGraph, policy: Policy, size: int, delays: Delays
    ) -> None:
        self.graph = of = policy.applied_to(of)
        self.policy = policy
        self.size = size
        self._delays = delays
        dispatchers = [self.fresh(member) for member in range(size)]
        self.ranks = [
            [Member(i, each[rank], of) for i, each in enumerate(dispatchers)]
            for rank in range(of.num_ranks)
        ]
        self.logs: list[list[Told]] = [[] for _ in range(size)]
        self.num_rounds = [0] * of.num_ranks
        self._unheard = [0] * of.num_ranks  # messages under way
        self._agenda: list[tuple[float, int, int, int, Event]] = []
        self._count = 0
        self._orders = None
        if policy.order == "fixed":
            self._orders = policies.checked_orders(of, policy).trace.launches()

    def fresh(self, member: int) -> list[Dispatcher]:
        """Returns the dispatchers of a member."""
        group = Group(member, self.size)
        groups = dict.fromkeys(range(self.graph.num_ranks), group)
        return policies.dispatchers(self.graph, self.policy, groups=groups)

    def run(self) -> "Network":
        """Runs until nothing is under way; checks each launch, and each silence."""
        for rank, members in enumerate(self.ranks):
            for member in members:
                self._post(0.0, rank, member.index, Started())
        while self._agenda:
            now_s, _, rank, index, event = heapq.heappop(self._agenda)
            self.logs[index].append(Told(now_s, rank, event))
            self._tell(self.ranks[rank][index], event, now_s)
            if self.policy.agreement == "intersection" and not self._unheard[rank]:
                self._check_silence(rank)
        return self

    def _tell(self, member: Member, event: Event, now_s: float) -> None:
        account, rank = member.account, member.dispatcher.rank
        match event:
            case Finished(task):
                account.running.remove(task)
            case Arrived(source, to):
                account.arrived.add((source, to))
            case Proposed():
                self._unheard[rank] -= 1
        self._note_ready(member, now_s)
        end_s = now_s
        for instruction in member.dispatcher.handle(event):
            match instruction:
                case Launch(task):
                    self._check_launch(member, task)
                    compute_s = self._delays.compute_s(task, member.index)
                    end_s = member.run(task, now_s, compute_s)
                    self._post(end_s, rank, member.index, Finished(task))
                    self._note_ready(member, now_s)
                case Send(source, to):
                    delay_s = self._delays.arrival_s(source, to, member.index)
                    target = self.graph.placement[to]
                    arrived = Arrived(source, to)
                    self._post(end_s + delay_s, target, member.index, arrived)
                case Propose(proposal):
                    self.num_rounds[rank] = proposal.round + 1
                    for other in set(range(self.size)) - {member.index}:
                        self._unheard[rank] += 1
                        due_s = now_s + self._delays.message_s()
                        told = Proposed(member.index, proposal)
                        self._post(due_s, rank, other, told)

    def _note_ready(self, member: Member, now_s: float) -> None:
        for task in member.account.ready():
            member.ready_s.setdefault(task, now_s)

    def _check_launch(self, member: Member, task: Task) -> None:
        account = member.account
        assert task in account.ready(), f"{task} early, twice or elsewhere"
        assert self._admits(member, task), f"{task} is over the limit or out of order"
        assert len(account.running) < self.policy.launch_ahead
        account.launched.append(task)
        account.running.add(task)

    def _admits(self, member: Member, task: Task) -> bool:
        account = member.account
        if self._orders is not None:
            order = self._orders[member.dispatcher.rank]
            return order[len(account.launched)] == task
        account.limit = self.policy.in_flight_limit
        return instrument.reserving(account, task)

    def _check_silence(self, rank: int) -> None:
        """All was heard: all are equally far, and leave nothing they could launch."""
        members = self.ranks[rank]
        first, *others = (member.account for member in members)
        assert all(first.launched == other.launched for other in others)
        if all(len(m.account.running) < self.policy.launch_ahead for m in members):
            common = set(first.ready()).intersection(*(o.ready() for o in others))
            left = [task for task in sorted(common) if self._admits(members[0], task)]
            assert not left, f"rank {rank} is free, and nobody proposes {left}"

    def _post(self, at_s: float, rank: int, member: int, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._agenda, (at_s, self._count, rank, member, event))

    @property
    def is_done(self) -> bool:
        """Whether each member launched and finished every task of its rank."""
        return all(
            member.dispatcher.is_done
            and sorted(member.account.launched) == sorted(member.account.own)
            for members in self.ranks
            for member in members
        )

    @property
    def makespan_s(self) -> float:
        """When the last task ended."""
        return max(m.spans[-1][2] for members in self.ranks for m in members)

    def sequences(self, rank: int) -> list[list[Task]]:
        """Returns, by member, what it launched."""
        return [member.account.launched for member in self.ranks[rank]]

    def hashes(self, rank: int) -> list[bytes]:
        """Returns, by member, the hash of what it launched."""
        return [member.dispatcher.sequence_hash for member in self.ranks[rank]]

    def lost_s(self, rank: int) -> float:
        """Returns for how long a device idled beside a task ready at all members.

        Of the member that lost most. With a limit that never bites, that is the time
        lost to agreement.
        """
        members = self.ranks[rank]
        everywhere_s = {
            task: max(member.ready_s[task] for member in members)
            for task in members[0].ready_s
        }
        return max(_lost_s(member, everywhere_s) for member in members)


def _lost_s(member: Member, everywhere_s: dict[Task, float]) -> float:
    lost_s, free_s = 0.0, 0.0
    for i, (_, start_s, end_s) in enumerate(member.spans):
        earliest_s = min(everywhere_s[task] for task, _, _ in member.spans[i:])
        lost_s += max(0.0, start_s - max(free_s, earliest_s))
        free_s = end_s
    return lost_s


def random_delays(seed: int) -> Delays:
    """Returns delays of which all, or none, or some are larger than a task's time."""
    draw = random.Random(f"{seed}/delays")
    arrival_s, message_s = draw.choice((0.0, 1.0, 20.0)), draw.choice((0.0, 0.3, 9.0))
    return Delays(
        lambda task, member: draw.choice((0.0, 1.0, draw.uniform(0.5, 2.0))),
        lambda source, to, member: draw.uniform(0.0, arrival_s),
        lambda: draw.uniform(0.0, message_s),
    )
