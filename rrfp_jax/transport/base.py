"""The seam between pipeline ranks: messages go out at launch and come in any order.

A message is named by what it carries, never by its position in a stream: the output of
task `source` for stage `to`. So no receive can block a send, arrival order is free, and
nothing has to be paired.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax

from rrfp_jax.core.task import Task


class Message(NamedTuple):
    """The name of a payload within a step."""

    source: Task
    to: int


class Transport(Protocol):
    """Moves payloads to the devices of other pipeline ranks."""

    def send(
        self,
        message: Message,
        payload: Sequence[jax.Array],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> None:
        """Starts moving `payload`, whose values may not exist yet. Does not block.

        Args:
          message: the payload's name; each may be used once a step.
          payload: arrays on the sending rank.
          shardings: where each of them is to lie on the receiving rank.

        Raises:
          ProtocolError: the name is in use.
        """
        ...

    def arrived(self) -> list[Message]:
        """Returns the messages that have arrived since the last call."""
        ...

    def take(self, message: Message) -> list[jax.Array]:
        """Hands over a payload that was sent here; its values may still be under way.

        Raises:
          ProtocolError: no such message is here.
        """
        ...

    def num_in_transit(self) -> int:
        """Returns how many messages have been sent and not been reported as arrived."""
        ...
