"""Authenticated letters between the processes of a run, over ZeroMQ with CURVE.

Who sent a letter is known from the key that its connection was made with, never from
what it says. Whatever comes from elsewhere (another run, another program, garbage) is
dropped and logged once a sender and reason, and the run goes on.

Each pair of processes has two connections a direction, control and bulk: a small letter
never queues behind a payload. Within a connection letters keep their order. A letter
travels as one multipart message, whole or not at all, of an envelope (`codec`) and its
frames, cut into chunks: libzmq encrypts a part at once, so that with smaller ones one
end deciphers while the other still enciphers, and its thread comes to other connections
in between.

ZeroMQ's high-water marks are off, so a send never blocks and drops nothing; what may be
under way is bounded by back-pressure, in `core`. A connection that breaks is made
again, but letters in it are lost: the numbers in the envelopes tell, and it is logged.
"""

import select
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import zmq
from absl import logging

from rrfp_jax.errors import ConfigError, ProtocolError
from rrfp_jax.transport import codec
from rrfp_jax.transport.bell import Bell
from rrfp_jax.transport.guard import Guard

# Measured with 64 KiB to 16 MiB: within a sixth of the best rate, and a small letter
# amid payloads comes after 0.3 ms (1 MiB: 0.7 ms, 4 MiB: 3 ms).
CHUNK_BYTES = 1 << 18
_OVERHEAD_BYTES = 256  # of a part, at most: CURVE and framing
_LINGER_MS = 1000


class Address(NamedTuple):
    """Where a process is reached, and how its letters are sealed."""

    endpoint: str  # tcp://host:port
    public_key: str  # of CURVE, in z85


class Letter(NamedTuple):
    """A letter that arrived. Arrays of its body are tuples; its frames are ours."""

    sender: int  # the process, by its key
    kind: str
    body: Any
    frames: list[memoryview]  # of bytes


class Mail:
    """The letter box of one process. For one thread, but for `wake`."""

    def __init__(self, process: int, run_id: str, host: str = "127.0.0.1") -> None:
        """Opens a port, which answers nobody before `introduce`.

        Args:
          process: this process.
          run_id: the same in all processes of a run, and in no other run.
          host: the IP address, or the network interface, at which the others reach
            this process.

        Raises:
          ConfigError: this machine has no such host.
        """
        self._process, self._run_id = process, run_id
        self._addresses: tuple[Address, ...] = ()
        self._outboxes: dict[tuple[int, bool], zmq.Socket[bytes]] = {}  # to, is_bulk
        self._num_sent: dict[tuple[int, bool], int] = {}  # to, is_bulk
        self._num_received: dict[tuple[int, bool], int] = {}  # sender, is_bulk
        self._to_self: list[Letter] = []
        self._logged: set[tuple[int, str]] = set()  # sender, reason
        self._bell = Bell()
        self._keys = zmq.curve_keypair()
        self._context = zmq.Context()
        self._context.max_sockets = self._context.get(zmq.SOCKET_LIMIT)
        self._guard = Guard(self._context, process)
        self._inbox = self._socket(zmq.ROUTER)
        self._inbox.curve_server = True
        self._guard.watch(self._inbox)
        try:
            self._inbox.bind(f"tcp://{host}:*")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"This machine cannot be reached at host {host!r}: {error}.\n"
                "  Give the IP address, or the name, of one of its network interfaces."
            ) from error
        endpoint = self._inbox.getsockopt_string(zmq.LAST_ENDPOINT)
        self.address = Address(endpoint, self._keys[0].decode())

    def introduce(self, addresses: Sequence[Address]) -> None:
        """Tells who takes part, by number of process; to be called once.

        Only they may connect. Connects to none of them yet: the first letter does.
        """
        self._addresses = tuple(addresses)
        self._guard.admit(
            {a.public_key.encode(): number for number, a in enumerate(addresses)}
        )

    def send(
        self,
        to: int,
        kind: str,
        body: Any,
        frames: Sequence[Any] = (),
        bulk: bool = False,
    ) -> None:
        """Posts a letter. Does not block, also while the receiver is not there.

        Args:
          to: the process; this one too.
          kind: names what it is about.
          body: what `codec.pack` takes, a quarter of a megabyte at most.
          frames: buffers or arrays, in C order. They are not copied, so they must not
            change any more.
          bulk: takes the channel for payloads. Order is kept within a channel only.

        Raises:
          ProtocolError: the body is too large.
        """
        views = [_as_bytes(frame) for frame in frames]
        number = self._num_sent.get((to, bulk), 0)
        sizes = tuple(view.nbytes for view in views)
        packed = codec.pack(
            codec.Envelope(self._run_id, bulk, number, kind, body, sizes)
        )
        if len(packed) > CHUNK_BYTES:
            raise ProtocolError(
                f"A letter {kind!r} to process {to} has {len(packed)} bytes without "
                f"its frames; at most {CHUNK_BYTES} are possible.\n"
                "  Send large values as frames."
            )
        self._num_sent[to, bulk] = number + 1
        if to == self._process:  # by way of the codec: tuples, like everybody else's
            self._to_self.append(
                Letter(to, kind, codec.unpack(packed).body, list(views))
            )
            return
        parts: list[bytes | memoryview] = [packed]
        for view in views:
            parts += _chunks(view)
        self._outbox(to, bulk).send_multipart(parts, zmq.NOBLOCK, copy=False)

    def receive(self) -> list[Letter]:
        """Returns the letters that are here. Does not block."""
        letters, self._to_self = self._to_self, []
        while self._has_mail():
            parts = self._inbox.recv_multipart(zmq.NOBLOCK, copy=False)
            sender = int(parts[1].get("User-Id"))  # as the guard told libzmq
            try:
                letters.append(self._open(sender, parts[1:]))
            except codec.RefusedLetter as refusal:
                if self._is_new(sender, refusal.reason):
                    logging.warning(
                        "process %d dropped a letter of process %d: %s; further ones "
                        "are not logged",
                        self._process,
                        sender,
                        refusal,
                    )
        return letters

    def wait(self, timeout_s: float) -> None:
        """Sleeps until there may be letters, until `wake`, or until the timeout.

        May be called with any timeout, microseconds included, and uses no CPU.
        """
        deadline_s = time.monotonic() + timeout_s
        # libzmq's descriptor tells of changes, not of letters: whether there are any
        # has to be asked before each sleep. `select`, since `poll` knows milliseconds
        # only; its limit of 1024 descriptors is no matter for sockets opened at start.
        while not self._to_self and not self._has_mail():
            rest_s = max(0.0, deadline_s - time.monotonic())
            sources: list[Any] = [self._inbox, self._bell]
            ready, _, _ = select.select(sources, [], [], rest_s)
            if self._bell in ready:
                self._bell.silence()
                return
            if not ready or not rest_s:
                return

    def wake(self) -> None:
        """Ends the present `wait`, or else the next. From any thread, at any time."""
        self._bell.ring()

    def dismiss(self, process: int) -> None:
        """Drops what has not gone out to a process that has left: `close` would wait.

        A letter sent to it afterwards makes a new connection.
        """
        for is_bulk in (False, True):
            outbox = self._outboxes.pop((process, is_bulk), None)
            if outbox is not None:
                outbox.close(linger=0)

    def close(self) -> None:
        """Closes, after a second at most in which the last letters go out."""
        self._inbox.close()
        self._guard.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._context.term()
        self._bell.close()

    def _has_mail(self) -> bool:
        events: Any = self._inbox.getsockopt(zmq.EVENTS)
        return bool(events & zmq.POLLIN)

    def _outbox(self, to: int, is_bulk: bool) -> zmq.Socket[bytes]:
        """Returns the connection to another process, made when first asked for."""
        if (to, is_bulk) not in self._outboxes:
            outbox = self._outboxes[to, is_bulk] = self._socket(zmq.DEALER)
            outbox.curve_serverkey = self._addresses[to].public_key.encode()
            outbox.connect(self._addresses[to].endpoint)
        return self._outboxes[to, is_bulk]

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.curve_publickey, socket.curve_secretkey = self._keys
        socket.set_hwm(0)
        socket.maxmsgsize = CHUNK_BYTES + _OVERHEAD_BYTES
        socket.linger = _LINGER_MS
        return socket

    def _open(self, sender: int, parts: Sequence[zmq.Frame]) -> Letter:
        """Reads what came from `sender`, a process of this run."""
        envelope = codec.unpack(parts[0].buffer)
        if envelope.run_id != self._run_id:
            raise codec.RefusedLetter(
                f"it is of another run than {self._run_id!r}", envelope.run_id
            )
        frames = list(_join(envelope.sizes, [part.buffer for part in parts[1:]]))
        channel = sender, envelope.is_bulk
        expected = self._num_received.get(channel, 0)
        if envelope.number != expected and self._is_new(sender, "lost"):
            logging.warning(
                "process %d misses letters of process %d, from its number %d to its "
                "number %d: a connection broke; further ones are not logged",
                self._process,
                sender,
                expected,
                envelope.number,
            )
        self._num_received[channel] = envelope.number + 1
        return Letter(sender, envelope.kind, envelope.body, frames)

    def _is_new(self, sender: int, reason: str) -> bool:
        """Returns whether this was not logged before."""
        is_new = (sender, reason) not in self._logged
        self._logged.add((sender, reason))
        return is_new


def _as_bytes(frame: Any) -> memoryview:
    """Returns the bytes of a buffer or array, in place if it is in C order."""
    if not isinstance(frame, bytes | bytearray | memoryview):
        array = np.ascontiguousarray(frame).reshape(-1)
        return array.view(np.uint8).data  # no memoryview is of bfloat16
    view = memoryview(frame)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _chunks(view: memoryview) -> Iterator[memoryview]:
    for start in range(0, view.nbytes, CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def _join(sizes: Sequence[int], chunks: Sequence[memoryview]) -> Iterator[memoryview]:
    """Puts frames of these sizes together. Copies those of several chunks, once.

    Raises:
      RefusedLetter: the chunks are not those of such frames.
    """
    found = [chunk.nbytes for chunk in chunks]
    # The sum first: it bounds how many chunks a false size can make us expect.
    if sum(found) != sum(sizes) or found != [
        min(CHUNK_BYTES, size - start)
        for size in sizes
        for start in range(0, size, CHUNK_BYTES)
    ]:
        raise codec.RefusedLetter("its frames are not those it announces", found)
    rest = iter(chunks)
    for size in sizes:
        if size <= CHUNK_BYTES:
            yield next(rest) if size else memoryview(b"")
            continue
        whole = np.empty(size, np.uint8).data
        for start in range(0, size, CHUNK_BYTES):
            whole[start : start + CHUNK_BYTES] = next(rest)
        yield whole
