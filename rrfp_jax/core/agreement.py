"""The launch agreement of a rank of several processes: the *members* of a group.

The program of a task has collectives among the members, so all must launch the same
tasks in the same order: one that differs hangs, or computes garbage. But each member
has its own receivers, and learns of arrivals at other times than the rest.

Theory. Arbiters that got the same calls choose the same task. So each member keeps an
arbiter that is fed with nothing but what all members know, and no member has to lead.
What all know is settled in numbered *rounds*: in each, every member tells all others
one `Proposal`, and whoever has those of all members has closed the round. What follows
is computed from these proposals and those before, which are the same everywhere.

Rules of `Intersection` (ours). Of RRFP's own, see `PerTask`.

1. A member proposes the tasks that have become ready at it since its last proposal, its
   *news*, and its *room*: how many launches it could bear, `launch_ahead` less those
   that are unfinished.
2. When a round closes, tasks that every member has reported by then are *common* and go
   to the arbiter, in the order of the proposals. Then what it chooses is launched, up
   to the smallest room. Until the round closes, a member that has spoken launches
   nothing, so its room can only have grown: what is agreed is launched at once.
3. A member answers a round that another one has begun at once, whatever it has to say.
4. It begins one only if it has room, and either news, or a common task to launch whose
   way its own room barred: it was the smallest, and is used up.
5. A member that has closed a round may speak in the next while others have yet to close
   it; these keep the early proposal. Further ahead nobody can be, since the next round
   needs a proposal of those others too. So messages may overtake one another.

Invariants. Arbiters of all members have had the same calls when they have closed the
same rounds; hence the launch sequences of two members are equal, or one is the
beginning of the other.

Nothing is left. Let all messages be delivered. By rule 3 no round is half told: all
members have closed the same ones. Let there be a task that is ready at every member,
admissible, and let all have room. If the arbiter chooses a task, the last round ended
because the smallest room was used up; a member whose it was has room now, and begins by
rule 4. Otherwise the common tasks are all held, so some ready task is not common: a
member has not reported it, has news, and begins by rule 4. So no such state lasts, and
a pipeline that finishes in one process finishes in groups: launches are some
readiness-first sequence, of ranks at which inputs arrive a little later.

Nothing spins. Who begins a round has had a task become ready or finished since it spoke
last, and no two rounds that it begins share that event. So there are at most as many
rounds as such events at all members, and none while nothing happens.

How late. With messages that take d, a task is launched d after it became ready
everywhere at the members that learned of it first, 2d at the one that learned last; as
much again if a round was open just then. While a launch ahead keeps the device busy,
this costs nothing.
"""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from rrfp_jax.core.arbiters import Arbiter
from rrfp_jax.core.events import Proposal
from rrfp_jax.core.rounds import Rounds, members
from rrfp_jax.core.task import Task
from rrfp_jax.errors import InvariantError

NAMES = ("intersection", "per_task", "off")


@dataclasses.dataclass(frozen=True)
class Group:
    """The processes that run one rank together, seen from one of them.

    Attributes:
      member: this process, 0 .. size-1.
      size: how many they are.
    """

    member: int
    size: int

    def __post_init__(self) -> None:
        if not 0 <= self.member < self.size:
            raise InvariantError(f"{self.member} is no member of {self.size}.")


class Agreement(Arbiter, Protocol):
    """An arbiter that chooses only what all members of a group launch.

    `add` tells it what is ready at this member, and `ready` returns that.
    """

    def heard(self, member: int, proposal: Proposal) -> None:
        """Takes in what another member said; a task may be agreed on then.

        Raises:
          ProtocolError: the member may not say this now.
        """
        ...

    def propose(self, num_unfinished: int) -> Proposal | None:
        """Returns what to tell all other members now, if anything; it counts as said.

        A task may be agreed on then. To be called after every event, when all that
        `choose` names was launched.

        Args:
          num_unfinished: launched tasks that have not finished here.
        """
        ...


def among(
    group: Group | None, name: str, arbiter: Arbiter, launch_ahead: int
) -> Agreement | None:
    """Returns the agreement that wraps `arbiter`, None where nobody has to agree.

    That is so in a rank of one process; and for `off`, with which the members go apart.

    Args:
      group: of the rank; None for one process.
      name: one of NAMES.
      arbiter: fresh, and for this agreement only.
      launch_ahead: how many launched tasks may be unfinished.
    """
    if group is None or group.size == 1 or name == "off":
        return None
    if name == "per_task":
        return PerTask(group, arbiter)
    return Intersection(group, arbiter, launch_ahead)


class Intersection:
    """Launches what is ready at all members; see the rules above.

    Args:
      group: of the rank.
      arbiter: wrapped; fed with all and only the common tasks.
      launch_ahead: how many launched tasks may be unfinished.
    """

    def __init__(self, group: Group, arbiter: Arbiter, launch_ahead: int) -> None:
        self._group = group
        self._rounds = Rounds(group.member, group.size)
        self._arbiter = arbiter
        self._launch_ahead = launch_ahead
        self._here: set[Task] = set()  # ready at this member, not launched
        self._news: list[Task] = []  # of these, what the others were not told
        # Task that is not common -> the members that reported it in closed rounds.
        self._reporters: dict[Task, set[int]] = {}
        self._agreed = 0  # what the last closed round allows, less launches since
        self._rest = 0  # the room that this member said last, less launches since

    def add(self, task: Task) -> None:
        """Learns that `task` is ready at this member: news."""
        self._here.add(task)
        self._news.append(task)

    def choose(self) -> Task | None:
        """Returns the next task of those agreed on, if any is left."""
        return self._arbiter.choose() if self._agreed else None

    def launched(self, task: Task) -> None:
        """Counts `task`."""
        self._arbiter.launched(task)
        self._here.remove(task)
        self._agreed -= 1
        self._rest -= 1

    def ready(self) -> Sequence[Task]:
        """Returns the tasks that are ready at this member and not launched."""
        return sorted(self._here)

    def why_held(self, task: Task) -> str:
        """Says for which members the ready `task` waits, or what holds it at all."""
        if why := self._rounds.why_open():
            return f"{task} is ready here; {why}"
        if task not in self._arbiter.ready():
            known = {self._group.member, *self._reporters.get(task, ())}
            others = [m for m in range(self._group.size) if m not in known]
            return f"{task} is ready here; not yet at {members(others)} of the group"
        if self._arbiter.choose() is None:
            return self._arbiter.why_held(task)
        return f"{task} is ready at every member of the group; one of them is busy"

    def heard(self, member: int, proposal: Proposal) -> None:
        """Takes in what another member said, and closes the round if it was the last.

        Raises:
          ProtocolError: the member may not say this now.
        """
        self._rounds.hear(member, proposal)
        self._close()

    def propose(self, num_unfinished: int) -> Proposal | None:
        """Answers a round, or begins one where this member's word may matter."""
        rounds, room = self._rounds, self._launch_ahead - num_unfinished
        if rounds.has_spoken or not (rounds.has_begun or self._begins(room)):
            return None
        proposal = Proposal(rounds.number, tuple(self._news), room)
        self._news.clear()
        self._rest = room
        rounds.say(proposal)
        self._close()
        return proposal

    def _begins(self, room: int) -> bool:
        if room <= 0:
            return False
        is_barred = not self._rest and self._arbiter.choose() is not None
        return bool(self._news) or is_barred

    def _close(self) -> None:
        told = self._rounds.close()
        if told is None:
            return
        for member, proposal in enumerate(told):  # in one order, the same everywhere
            for task in proposal.ready:
                reporters = self._reporters.setdefault(task, set())
                reporters.add(member)
                if len(reporters) == len(told):
                    del self._reporters[task]
                    self._arbiter.add(task)
        self._agreed = min(proposal.room for proposal in told)


class PerTask:
    """RRFP's own agreement: on one task at a time, when the device is free (§4.2).

    Each member proposes what its arbiter would launch of what is ready at it. All
    equal: it is launched. Else nobody launches and nothing is consumed, and the next
    round begins when the choice of a member has changed. For comparison: all of it is
    on the critical path, and a task that is ready everywhere waits while the members
    prefer others.

    Where the paper's processes poll, here a member without a ready task keeps its
    answer back until it has one, which is never later. It does not stall: what another
    member proposes becomes ready here too; and once nothing more arrives, all members
    have the same tasks ready and choose the same. Between rounds that came to nothing
    somebody's choice changes, so nothing spins.

    Args:
      group: of the rank.
      arbiter: wrapped; fed with all that is ready at this member.
    """

    def __init__(self, group: Group, arbiter: Arbiter) -> None:
        self._rounds = Rounds(group.member, group.size)
        self._arbiter = arbiter
        self._said: Task | None = None  # what this member proposed last
        self._agreed: Task | None = None  # until it is launched
        self.add = arbiter.add
        self.ready = arbiter.ready

    def choose(self) -> Task | None:
        """Returns the task agreed on, if it was not launched."""
        return self._agreed

    def launched(self, task: Task) -> None:
        """Consumes `task`, which the arbiter may by now not rank first."""
        self._arbiter.launched(task)
        self._agreed = None

    def why_held(self, task: Task) -> str:
        """Says for which members the ready `task` waits, or what holds it here."""
        if self._arbiter.choose() is None:
            return self._arbiter.why_held(task)
        if why := self._rounds.why_open():
            return f"{task} is ready here; {why}"
        return f"{task} is ready here; the group has not agreed on it"

    def heard(self, member: int, proposal: Proposal) -> None:
        """Takes in what another member said, and closes the round if it was the last.

        Raises:
          ProtocolError: the member may not say this now.
        """
        self._rounds.hear(member, proposal)
        self._close()

    def propose(self, num_unfinished: int) -> Proposal | None:
        """Says what this member would launch, once its device is free."""
        rounds = self._rounds
        if num_unfinished or rounds.has_spoken:
            return None
        choice = self._arbiter.choose()
        if choice is None or (choice == self._said and not rounds.has_begun):
            return None
        proposal = Proposal(rounds.number, (choice,), 1)
        self._said = choice
        rounds.say(proposal)
        self._close()
        return proposal

    def _close(self) -> None:
        told = self._rounds.close()
        if told is not None and all(each.ready == told[0].ready for each in told):
            self._agreed = told[0].ready[0]
