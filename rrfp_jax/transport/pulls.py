"""The transfer library between processes: one offers arrays, another pulls them.

An offer is made at launch, before the values exist, under a random number that the
letter tells. Both sides return at once; what was pulled is ready when its data is here.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import jax

_ID_BITS = 63


class Pulls:
    """The transfer server of a process, and its connections to others'.

    Args:
      host: the address of this process's network interface.

    Attributes:
      address: where others pull from.
    """

    def __init__(self, host: str) -> None:
        from jax.experimental import transfer  # no part of every build of JAX

        client = jax.local_devices()[0].client
        where = f"{host}:0"
        self._server = transfer.start_transfer_server(client, where, [where])
        self.address: str = self._server.address()
        self._connections: dict[str, Any] = {}

    def offer(self, arrays: Sequence[jax.Array]) -> int:
        """Lets one other process pull arrays, each on one device; returns the number.

        They are kept until they are pulled, but must not be donated before.
        """
        number = secrets.randbits(_ID_BITS)
        self._server.await_pull(number, list(arrays))
        return number

    def pull(
        self, address: str, number: int, wanted: Sequence[jax.ShapeDtypeStruct]
    ) -> list[jax.Array]:
        """Returns arrays that come to be ready.

        Args:
          address: of the server that offers them.
          number: of the offer; each can be pulled once.
          wanted: shape, dtype, and the sharding on one device of this process.
        """
        if address not in self._connections:
            self._connections[address] = self._server.connect(address)
        arrays: list[jax.Array] = self._connections[address].pull(number, list(wanted))
        return arrays
