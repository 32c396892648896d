"""Transport between ranks of one process: `jax.device_put` at launch."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport.base import Arrival, Expected, Name, describe


class InProcess:
    """Copies payloads from devices to devices, asynchronously.

    XLA starts the copy when the value exists, so the host has nothing to do between the
    launch of a task and the arrival of its output.
    """

    def __init__(self) -> None:
        self._names: set[Name] = set()  # all that were sent in this step
        self._payloads: dict[Name, list[jax.Array]] = {}  # sent and not taken
        # Sent and not reported, oldest first: what to watch of each, without keeping it
        # alive. What is gone has arrived and been used.
        self._in_transit: dict[Name, list[weakref.ref[Any]]] = {}

    def begin(self, expects: Callable[[Name], Expected]) -> None:
        """Forgets the last step. What arrives needs no check: it never left."""
        del expects
        self._names.clear()
        self._payloads.clear()
        self._in_transit.clear()

    def send(
        self,
        message: Name,
        payload: Sequence[jax.Array],
        shardings: Sequence[jax.sharding.Sharding],
        due_s: float | None = None,
    ) -> None:
        """Starts the copies. Does not block."""
        del due_s  # the machine that emulates the link keeps the time of its arrival
        if message in self._names:
            raise ProtocolError(f"{describe(message)} was sent twice.")
        self._names.add(message)
        moved = copied(payload, shardings)
        self._payloads[message] = moved
        self._in_transit[message] = [weakref.ref(array) for array in moved]

    def arrived(self) -> list[Arrival]:
        """Returns the messages whose copies have completed since the last call."""
        complete = [
            message
            for message, arrays in self._in_transit.items()
            if all(map(_is_there, arrays))
        ]
        for message in complete:
            del self._in_transit[message]
        return [Arrival(message) for message in complete]

    def has(self, message: Name) -> bool:
        """Whether it was sent and not taken."""
        return message in self._payloads

    def take(self, message: Name) -> list[jax.Array]:
        """Hands over a payload."""
        try:
            return self._payloads.pop(message)
        except KeyError as error:
            raise ProtocolError(f"{describe(message)} is not here.") from error

    def num_in_transit(self) -> int:
        """Returns how many messages have not been reported as arrived."""
        return len(self._in_transit)


def copied(
    values: Sequence[Any], shardings: Sequence[jax.sharding.Sharding]
) -> list[Any]:
    """Starts copies of values to where they are to lie, on devices of this process.

    To name one device for all costs JAX half of what a sharding for each does, which
    is most of what a send costs the host.
    """
    where: Any = list(shardings)
    if where and all(each is where[0] for each in where):
        where = where[0]
        if isinstance(where, jax.sharding.SingleDeviceSharding):
            (where,) = where.device_set
    found: list[Any] = jax.device_put(list(values), where) if values else []
    return found


def _is_there(reference: "weakref.ref[Any]") -> bool:
    array: Any = reference()
    if array is None:
        return True
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)  # a key array has no `is_ready`
    return bool(array.is_ready())
