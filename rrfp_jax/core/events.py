"""What a dispatcher is told (events) and what it answers (instructions)."""

from typing import NamedTuple

from rrfp_jax.core.task import Task


class Started(NamedTuple):
    """The step begins: whatever needs no input is ready."""


class Arrived(NamedTuple):
    """The output of `source`, run on another rank, is here for stage `to`."""

    source: Task
    to: int


class Finished(NamedTuple):
    """The outputs of `task`, launched on this rank, exist."""

    task: Task


class Proposal(NamedTuple):
    """What a member of a rank's group says once in each round of `core.agreement`.

    Attributes:
      round: counts from 0 in each step.
      ready: the tasks that it speaks for; which, depends on the agreement.
      room: how many more tasks it may launch.
    """

    round: int
    ready: tuple[Task, ...]
    room: int

    def __str__(self) -> str:
        tasks = " ".join(map(str, self.ready)) or "nothing new"
        return f"round {self.round}: {tasks}, room {self.room}"


class Proposed(NamedTuple):
    """Another member of this rank's group said this."""

    member: int
    proposal: Proposal


class Launch(NamedTuple):
    """Run `task` on this rank, after everything launched before it."""

    task: Task


class Send(NamedTuple):
    """Ship the output of `source`, once it exists, to stage `to` on another rank."""

    source: Task
    to: int


class Propose(NamedTuple):
    """Tell this to all other members of the rank's group."""

    proposal: Proposal


Event = Started | Arrived | Finished | Proposed
Instruction = Launch | Send | Propose
