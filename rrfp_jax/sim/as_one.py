"""The launch agreement of a whole group, settled by one object a rank.

Theory. In a round a member speaks when it begins one (rule 4), or else when it hears
that another has (rule 3). All letters take the time d, so if the first speaks at t, all
have spoken by t + d. By then all is known that decides who said what and when: when
each task became ready at each member, and since when the rank has room, which is the
same for all of them but for the moment at which each closed the round before. The
arbiters of all members get the same calls, so one stands for all; what differs is when
each member closes the round, and a task begins when the last of them has launched it.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.core.arbiters import Arbiter
from rrfp_jax.core.events import Arrived, Proposal, Proposed
from rrfp_jax.core.task import Task

_NEVER = math.inf


class _News(NamedTuple):
    """A task that is not common.

    Attributes:
      ready_s: when at each member.
      untold: the members that have not told the others.
      first_s: when at the first of these.
      last_s: when at the last of them.
    """

    ready_s: Sequence[float]
    untold: Sequence[int]
    first_s: float
    last_s: float


class AsOne:
    """The launch agreement of a whole group, for one dispatcher.

    Args:
      size: members, at least two.
      letter_s: from one to another.
      arbiter: of the rank.
      launch_ahead: how many launched tasks may be unfinished.

    Attributes:
      now_s: the time, to be set before the dispatcher is told anything.
      num_rounds: closed so far.
      begins_s: when the next round begins, or has begun; infinite while nobody has
        anything to say.
      launches_s: when the last member launches what the last round agreed on.
    """

    def __init__(
        self, size: int, letter_s: float, arbiter: Arbiter, launch_ahead: int
    ) -> None:
        self.now_s = 0.0
        self.num_rounds = 0
        self.begins_s = math.inf
        self.launches_s = 0.0
        self._members = range(size)
        self._letter_s = letter_s
        self._arbiter = arbiter
        self._launch_ahead = launch_ahead
        # Inputs that were sent to a task that misses others: when each member has them.
        self._inputs_s: dict[Task, Sequence[float]] = {}
        self._news: dict[Task, _News] = {}  # all and only what is not common
        self._closed_s: Sequence[float] = (0.0,) * size  # the last round, by member
        self._rooms = [0] * size  # said in it
        self._launches = 0  # since it
        self._agreed = 0  # launches that it allows, less those
        self._unfinished = 0
        self._free_s = 0.0  # since when there is room, where there is
        self._finished_s: list[float] = []  # finishes since the last round

    def foresee(self, arrival: Arrived, at_s: Sequence[float]) -> None:
        """Learns when each member has an input, of which the first has it now."""
        (kind, _, j), to = arrival
        task = Task(kind, to, j)
        known_s = self._inputs_s.get(task)
        self._inputs_s[task] = at_s if known_s is None else _later(known_s, at_s)

    def add(self, task: Task) -> None:
        """Learns that `task` has all inputs at some member, or will have by then."""
        ready_s = self._inputs_s.pop(task, self._closed_s)
        self._news[task] = _News(ready_s, self._members, min(ready_s), max(ready_s))

    def choose(self) -> Task | None:
        """Returns the next task of those agreed on, if any is left."""
        return self._arbiter.choose() if self._agreed else None

    def launched(self, task: Task) -> None:
        """Counts `task`."""
        self._arbiter.launched(task)
        self._agreed -= 1
        self._launches += 1
        self._unfinished += 1

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready at some member and not launched."""
        return sorted([*self._news, *self._arbiter.ready()])

    def why_held(self, task: Task) -> str:
        """Says what holds the ready `task`."""
        if task in self._news:
            return f"{task} was not told by all members of the group"
        return self._arbiter.why_held(task)

    def heard(self, member: int, proposal: Proposal) -> None:
        """Takes in what `close` returned."""
        for task in proposal.ready:
            self._arbiter.add(task)
        self._agreed = proposal.room

    def propose(self, num_unfinished: int) -> None:
        """Settles when the next round begins; a group that is one tells nobody."""
        if num_unfinished < self._unfinished:  # one has finished
            self._unfinished = num_unfinished
            self._finished_s.append(self.now_s)
            if num_unfinished == self._launch_ahead - 1:
                self._free_s = self.now_s
        if self.begins_s > self.now_s:  # it has not begun
            self.begins_s = math.inf
            if self._unfinished < self._launch_ahead:
                self.begins_s = self._first_s()

    def _first_s(self) -> float:
        """Returns when the first member begins a round."""
        if any(self._barred()):
            told_s = 0.0
        else:
            told_s = min((each.first_s for each in self._news.values()), default=_NEVER)
        first_s = max(told_s, self._free_s)
        if first_s >= self.launches_s:  # all have closed the last round by then
            return first_s
        return min(self._spoken_s())

    def _barred(self) -> Sequence[bool]:
        """Returns, by member, whether its room was all that barred a common task."""
        if self._launches in self._rooms and self._arbiter.choose() is not None:
            return [room == self._launches for room in self._rooms]
        return ()

    def _spoken_s(self) -> list[float]:
        """Returns when each member would begin a round, if no other did."""
        told_s = [_NEVER] * len(self._members)
        for ready_s, untold, _, _ in self._news.values():
            for member in untold:
                if ready_s[member] < told_s[member]:
                    told_s[member] = ready_s[member]
        for member, is_barred in enumerate(self._barred()):
            if is_barred:
                told_s[member] = 0.0
        free_s = self._free_s
        return [
            max(told, closed, free_s)
            for told, closed in zip(told_s, self._closed_s, strict=True)
        ]

    def close(self) -> Proposed | None:
        """Returns what the members have told each other in the round, `now_s` being
        when the last of them must have spoken: what is common, and the smallest room.

        None if no launch can follow, as often when the members told of a task apart;
        then the dispatcher need not hear of it.
        """
        begun_s, size = self.begins_s, len(self._members)
        room = self._launch_ahead - self._unfinished
        if self._all_begin(begun_s):
            spoken_s = [begun_s] * size
            self._closed_s = [self.now_s] * size
        else:
            spoken_s = [min(self.now_s, each) for each in self._spoken_s()]
            self._closed_s = self._heard_s(spoken_s)
        self.launches_s = max(self._closed_s)
        self._rooms = [room] * size
        for end_s in self._finished_s:
            if end_s > begun_s:  # who had spoken by then did not know
                self._rooms = [
                    room - (end_s > said_s)
                    for room, said_s in zip(self._rooms, spoken_s, strict=True)
                ]
        self._launches, self._finished_s = 0, []
        common = self._tell(spoken_s)
        self.begins_s = math.inf
        number, self.num_rounds = self.num_rounds, self.num_rounds + 1
        if not common and self._arbiter.choose() is None:
            self._agreed = 0
            self.propose(self._unfinished)
            return None
        return Proposed(0, Proposal(number, tuple(common), min(self._rooms)))

    def _all_begin(self, begun_s: float) -> bool:
        """Whether it is clear that no member waits to be told of the round."""
        if self.launches_s > begun_s:
            return False
        size = len(self._members)
        for each in self._news.values():
            if each.last_s <= begun_s and len(each.untold) == size:
                return True
        barred = self._barred()
        return bool(barred) and all(barred)

    def _tell(self, spoken_s: Sequence[float]) -> list[Task]:
        """Moves on what each member has told; returns what is common now."""
        begun_s, common = min(spoken_s), []
        for task, (ready_s, untold, first_s, last_s) in self._news.items():
            if last_s <= begun_s:
                common.append(task)
            elif first_s <= self.now_s:
                rest = [m for m in untold if ready_s[m] > spoken_s[m]]
                if rest:
                    rest_s = [ready_s[m] for m in rest]
                    self._news[task] = _News(ready_s, rest, min(rest_s), max(rest_s))
                else:
                    common.append(task)
        for task in common:
            del self._news[task]
        return common

    def _heard_s(self, spoken_s: Sequence[float]) -> list[float]:
        """Returns when each member has all proposals: its own, and the others'."""
        *_, second_s, last_s = sorted(spoken_s)
        due_s = last_s + self._letter_s
        closed_s = [due_s] * len(spoken_s)
        if second_s < last_s:
            closed_s[spoken_s.index(last_s)] = max(last_s, second_s + self._letter_s)
        return closed_s


def _later(some_s: Sequence[float], others_s: Sequence[float]) -> Sequence[float]:
    return tuple(map(max, some_s, others_s))
