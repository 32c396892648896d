"""Transport between ranks of one process: `jax.device_put` at launch."""

from collections.abc import Sequence
from typing import Any

import jax

from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport.base import Message


class InProcess:
    """Copies payloads from devices to devices, asynchronously.

    XLA starts the copy when the value exists, so the host has nothing to do between the
    launch of a task and the arrival of its output.
    """

    def __init__(self) -> None:
        self._payloads: dict[Message, list[jax.Array]] = {}  # sent and not taken
        self._in_transit: list[Message] = []  # sent and not reported, oldest first

    def send(
        self,
        message: Message,
        payload: Sequence[jax.Array],
        shardings: Sequence[jax.sharding.Sharding],
    ) -> None:
        """Starts the copies. Does not block."""
        if message in self._payloads:
            raise ProtocolError(f"{message.source} was sent to {message.to} twice.")
        self._payloads[message] = (
            jax.device_put(list(payload), list(shardings)) if payload else []
        )
        self._in_transit.append(message)

    def arrived(self) -> list[Message]:
        """Returns the messages whose copies have completed since the last call."""
        complete = [m for m in self._in_transit if self._is_complete(m)]
        if complete:
            self._in_transit = [m for m in self._in_transit if m not in complete]
        return complete

    def take(self, message: Message) -> list[jax.Array]:
        """Hands over a payload."""
        try:
            return self._payloads.pop(message)
        except KeyError as error:
            raise ProtocolError(
                f"{message.source} is not here for {message.to}."
            ) from error

    def num_in_transit(self) -> int:
        """Returns how many messages have not been reported as arrived."""
        return len(self._in_transit)

    def _is_complete(self, message: Message) -> bool:
        return all(map(_is_ready, self._payloads[message]))


def _is_ready(array: Any) -> bool:
    """Whether the values exist. Any: the stub of `jax.Array` lacks `is_ready`."""
    return bool(array.is_ready())
