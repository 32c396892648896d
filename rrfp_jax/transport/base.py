"""The seam between pipeline ranks: messages go out at launch and come in any order.

A message is named by what it carries, never by its position in a stream: the output of
task `source` for stage `to`. So no receive can block a send, arrival order is free, and
nothing has to be paired.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax

from rrfp_jax.core.task import Task


class Message(NamedTuple):
    """The name of a payload within a step."""

    source: Task
    to: int


class Tied(NamedTuple):
    """The name of a tied parameter, or of its gradient, on its way to another stage.

    Attributes:
      is_gradient: which of the two it is.
      group: the number of the group of tied parameters.
      source: the copy that it comes from, by its place in the group.
      to: the copy that it goes to.
    """

    is_gradient: bool
    group: int
    source: int
    to: int


Name = Message | Tied


def describe(name: Name) -> str:
    """Names a message in an error."""
    if isinstance(name, Tied):
        what = "gradient" if name.is_gradient else "value"
        copies = f"copy {name.source} to copy {name.to}"
        return f"the {what} of tied parameter {name.group} from {copies}"
    _, stage, microbatch = name.source
    return f"{name.source} (stage {stage}, microbatch {microbatch}) for stage {name.to}"


class Expected(NamedTuple):
    """What a message brings.

    Attributes:
      avals: of the arrays, whole.
      sources: where each of them lies at the sender.
      targets: where each is to lie at the receiver.
      senders: the processes that drive the sender's devices, ascending.
      receivers: those that drive the receiver's.
      sample_ids: of its microbatch; empty where there is none.
    """

    avals: Sequence[jax.ShapeDtypeStruct]
    sources: Sequence[jax.sharding.Sharding]
    targets: Sequence[jax.sharding.Sharding]
    senders: tuple[int, ...]
    receivers: tuple[int, ...]
    sample_ids: tuple[int, ...] = ()


class Arrival(NamedTuple):
    """A message that is here, and when it may be seen (see `Transport.send`)."""

    message: Name
    due_s: float | None = None


class Transport(Protocol):
    """Moves payloads to the devices of other pipeline ranks."""

    def begin(self, expects: Callable[[Name], Expected]) -> None:
        """Starts the next step: every name may be used again.

        Args:
          expects: says what a message of this step is to bring.
        """
        ...

    def send(
        self,
        message: Name,
        payload: Sequence[jax.Array],
        shardings: Sequence[jax.sharding.Sharding],
        due_s: float | None = None,
    ) -> None:
        """Starts moving `payload`, whose values may not exist yet. Does not block.

        Args:
          message: the payload's name; each may be used once a step.
          payload: arrays on the sending rank. Those of a `Message` must not be donated
            in this step; those of a `Tied` may be once their values exist and `arrived`
            was called since.
          shardings: where each of them is to lie on the receiving rank.
          due_s: on `time.perf_counter`, when it may be seen; only for emulation, which
            is on one machine.

        Raises:
          ProtocolError: the name is in use.
        """
        ...

    def arrived(self) -> list[Arrival]:
        """Returns the messages that have arrived since the last call."""
        ...

    def has(self, message: Name) -> bool:
        """Whether `take` would hand it over."""
        ...

    def take(self, message: Name) -> list[jax.Array]:
        """Hands over a payload that is here; its values may still be under way.

        Raises:
          ProtocolError: no such message is here.
        """
        ...

    def num_in_transit(self) -> int:
        """Returns how many messages are under way, as far as this process knows.

        While there are some, `arrived` must be called now and then.
        """
        ...
