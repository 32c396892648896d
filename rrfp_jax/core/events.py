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


class Launch(NamedTuple):
    """Run `task` on this rank, after everything launched before it."""

    task: Task


class Send(NamedTuple):
    """Ship the output of `source`, once it exists, to stage `to` on another rank."""

    source: Task
    to: int


Event = Started | Arrived | Finished
Instruction = Launch | Send
