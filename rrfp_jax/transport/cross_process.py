"""Transport between pipeline ranks of several processes.

A payload goes part by part, each from a device that has it to a process that needs it
(`transport.pieces`), in one of two ways:

* through the host: once its value exists, the sender puts it into a letter;
* by the transfer library: the sender offers it at launch, before its value exists, and
  says so in a letter; the receiver begins to pull at once.

What is small goes through the host, where one trip is all. Where the rest goes is the
user's choice; `docs/clusters.md` has the figures it rests on.

Nothing waits here. A letter of a later step is held until that step begins. One of an
earlier step, one that came before, and one that is not what this process expects are
errors that name it.

A tied parameter, or its gradient, may be donated while it is on its way. On a CPU a
letter holds the very memory of an array, but JAX reuses no memory that NumPy holds too.
The transfer library has no such protection (a pull of what was donated fails), so what
may be donated is copied before it is offered.

Receive buffers are bounded. A rank's cotangents are bounded by what it has in flight
itself, activations by what their sender has in flight. Nothing holds back a sender that
has no backward, such as a frozen tower; so of each edge no more than `max_pulls`
payloads are pulled before one is taken, but for the lowest microbatch that is there,
for which the other edge of a join may wait.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport import codec, notices, pieces
from rrfp_jax.transport.base import Arrival, Expected, Name, Tied, describe
from rrfp_jax.transport.in_process import InProcess
from rrfp_jax.transport.mail import Letter, Mail
from rrfp_jax.transport.notices import Notice
from rrfp_jax.transport.pieces import Box, Key
from rrfp_jax.transport.pulls import Pulls


class Part(NamedTuple):
    """A part of a payload at its sender: one device has it."""

    key: Key
    data: Any  # a jax.Array; its type stub lacks `is_ready`


@dataclasses.dataclass
class _Incoming:
    """A message that this process expects, and what is here of it.

    Attributes:
      expected: what the step says it is to bring.
      routes: by sender, the parts that it tells of.
      missing: the senders whose letter has not come.
      parts: arrays, on the host or on a device of this process; perhaps under way.
      offers: what may be pulled and is not yet.
      due_s: see `Transport.send`.
    """

    expected: Expected
    routes: Mapping[int, Collection[Key]]
    missing: set[int]
    parts: dict[Key, Any] = dataclasses.field(default_factory=dict)
    offers: list[tuple[str, int, list[Key]]] = dataclasses.field(default_factory=list)
    due_s: float | None = None


@dataclasses.dataclass
class _Outgoing:
    """Parts that go into a letter once their values exist."""

    receiver: int
    body: list[Any]
    parts: list[Part]


class CrossProcess:
    """Moves payloads between the ranks of one pipeline, wherever they are.

    Args:
      mail: of this process; `on_letter` is to be given its letters of kind `kind`.
      kind: of the letters: one for each pipeline.
      pulls: the transfer library; None for everything through the host.
      host_limit_bytes: parts up to so many bytes go through the host all the same.
      max_pulls: payloads of an edge that are pulled and not taken.
    """

    def __init__(
        self,
        mail: Mail,
        kind: str,
        pulls: Pulls | None = None,
        host_limit_bytes: int = 0,
        max_pulls: int = 32,
    ) -> None:
        self._mail = mail
        self._kind = kind
        self._pulls = pulls
        self._host_limit_bytes = host_limit_bytes
        self._max_pulls = max_pulls
        self._process = jax.process_index()
        self._near = InProcess()  # between ranks of this process
        self._step = -1
        self._expects: Callable[[Name], Expected] = _nothing
        self._held: dict[int, list[Letter]] = {}  # by step to come
        self._sent: set[Name] = set()
        self._outgoing: list[_Outgoing] = []
        self._incoming: dict[Name, _Incoming] = {}
        self._known: set[Name] = set()  # that have begun to arrive
        self._payloads: dict[Name, list[jax.Array]] = {}
        # By edge, those that are pulled and not taken.
        self._pulled: collections.defaultdict[tuple[int, ...], set[Name]] = (
            collections.defaultdict(set)
        )

    def begin(self, expects: Callable[[Name], Expected]) -> None:
        """Starts the next step, with the letters of it that are here already.

        Whatever the last step has left here is dropped; what it has left to post is
        not, since others may still be in that step.
        """
        self._near.begin(expects)
        self._step += 1
        self._expects = functools.cache(expects)
        for names in (self._sent, self._known, self._pulled):
            names.clear()
        for payloads in (self._incoming, self._payloads):
            payloads.clear()
        for letter in self._held.pop(self._step, []):
            self.on_letter(letter)

    def send(
        self,
        message: Name,
        payload: Sequence[jax.Array],
        shardings: Sequence[jax.sharding.Sharding],
        due_s: float | None = None,
    ) -> None:
        """Starts moving `payload`. Does not block."""
        if message in self._sent:
            raise ProtocolError(f"{describe(message)} was sent twice.")
        self._sent.add(message)
        expected = self._expects(message)
        if {*expected.senders, *expected.receivers} == {self._process}:
            self._near.send(message, payload, shardings)
            return
        plain = [pieces.plain(array) for array in payload]
        for (sender, receiver), route in pieces.routes(
            pieces.as_plain(expected)
        ).items():
            if sender == self._process:
                parts = [
                    Part(key, pieces.on_device(plain[key[0]], device))
                    for key, device in route.items()
                ]
                self._post(receiver, message, expected, parts, due_s)

    def flush(self) -> bool:
        """Posts what waits for its value; returns whether more does."""
        waiting = []
        for each in self._outgoing:
            if all(part.data.is_ready() for part in each.parts):
                frames = [np.asarray(part.data) for part in each.parts]
                # JAX may hand out another layout than rows first.
                plain = [np.ascontiguousarray(frame) for frame in frames]
                self._mail.send(each.receiver, self._kind, each.body, plain, bulk=True)
            else:
                waiting.append(each)
        self._outgoing = waiting
        return bool(waiting)

    def arrived(self) -> list[Arrival]:
        """Returns the messages that have arrived since the last call."""
        self.flush()
        found = self._near.arrived()
        for message, incoming in list(self._incoming.items()):
            if incoming.offers:
                self._pull(message, incoming)
            if incoming.missing or incoming.offers:
                continue
            if all(map(_is_here, incoming.parts.values())):
                del self._incoming[message]
                self._payloads[message] = self._assembled(message, incoming)
                found.append(Arrival(message, incoming.due_s))
        return found

    def has(self, message: Name) -> bool:
        """Whether it is here."""
        return message in self._payloads or self._near.has(message)

    def take(self, message: Name) -> list[jax.Array]:
        """Hands over a payload."""
        if message not in self._payloads:
            return self._near.take(message)
        self._pulled[_edge(message)].discard(message)
        return self._payloads.pop(message)

    def num_in_transit(self) -> int:
        """Returns how many messages this process sends, pulls or copies just now."""
        return self._near.num_in_transit() + len(self._outgoing) + len(self._incoming)

    def num_to_post(self) -> int:
        """Returns how many letters wait for the values that go into them."""
        return len(self._outgoing)

    def on_letter(self, letter: Letter) -> None:
        """Takes in a letter that tells of a message, or brings it.

        Raises:
          ProtocolError: it is not what this process expects.
        """
        step, told = notices.read(letter)
        if step > self._step:
            self._held.setdefault(step, []).append(letter)
            return
        where = f"{describe(told.message)} of step {step}, from process {letter.sender}"
        if step < self._step:
            raise ProtocolError(f"{where}, comes in step {self._step}: too late.")
        incoming = self._expect(told.message, letter.sender, where)
        incoming.missing.remove(letter.sender)
        if told.due_s is not None:
            incoming.due_s = max(told.due_s, incoming.due_s or told.due_s)
        expected = incoming.expected
        if told.sample_ids != expected.sample_ids:
            raise ProtocolError(
                f"{where}, was computed from the samples {told.sample_ids}; here that "
                f"microbatch is {expected.sample_ids}.\n  Give all processes the same "
                "data, and the same --config.data.seed."
            )
        notices.check(told.headers, incoming.routes[letter.sender], expected, where)
        if told.address is None:
            rows = zip(told.headers.items(), letter.frames, strict=True)
            for (key, header), frame in rows:
                incoming.parts[key] = codec.read_array(header, frame)
        else:
            incoming.offers.append((told.address, told.number, list(told.headers)))
            self._pull(told.message, incoming)

    def _post(
        self,
        receiver: int,
        message: Name,
        expected: Expected,
        parts: Sequence[Part],
        due_s: float | None,
    ) -> None:
        """Sends one process its parts of a message, all of them in one way."""
        headers = {
            part.key: codec.ArrayHeader(part.data.dtype, part.data.shape)
            for part in parts
        }
        notice = Notice(message, due_s, expected.sample_ids, None, 0, headers)
        num_bytes = sum(part.data.nbytes for part in parts)
        goes_out = receiver != self._process
        if self._pulls and goes_out and num_bytes > self._host_limit_bytes:
            offered = [part.data for part in parts]
            if isinstance(message, Tied):  # which may be donated before it is pulled
                offered = [jax.numpy.copy(each) for each in offered]
            number = self._pulls.offer(offered)
            notice = notice._replace(address=self._pulls.address, number=number)
            body = notices.pack(self._step, notice)
            self._mail.send(receiver, self._kind, body)
            return
        if any(part.data.device.platform != "cpu" for part in parts):
            for part in parts:
                part.data.copy_to_host_async()  # so that `flush` finds it there
        body = notices.pack(self._step, notice)
        self._outgoing.append(_Outgoing(receiver, body, list(parts)))

    def _expect(self, message: Name, sender: int, where: str) -> _Incoming:
        found = self._incoming.get(message)
        if found is None:
            if message in self._known:
                raise ProtocolError(f"{where}, came twice.")
            self._known.add(message)
            try:
                expected = pieces.as_plain(self._expects(message))
            except KeyError as error:
                raise ProtocolError(f"{where}, is not expected here.") from error
            ways = {
                process: route
                for (process, receiver), route in pieces.routes(expected).items()
                if receiver == self._process
            }
            found = self._incoming[message] = _Incoming(expected, ways, set(ways))
        if sender not in found.routes:
            raise ProtocolError(
                f"{where}, is not expected from there, but from {sorted(found.routes)}."
            )
        if sender not in found.missing:
            raise ProtocolError(f"{where}, came twice.")
        return found

    def _assembled(self, message: Name, incoming: _Incoming) -> list[jax.Array]:
        found: list[dict[Box, Any]] = [{} for _ in incoming.expected.avals]
        for (index, box), part in incoming.parts.items():
            found[index][box] = part
        plain, whole = incoming.expected, self._expects(message)
        rows = zip(found, plain.targets, plain.avals, whole.avals, strict=True)
        return [
            pieces.restored(pieces.assemble(parts, target, aval), as_sent.dtype)
            for parts, target, aval, as_sent in rows
        ]

    def _pull(self, message: Name, incoming: _Incoming) -> None:
        """Begins to pull what is offered, unless too much is here already."""
        pulled = self._pulled[_edge(message)]
        if message not in pulled and not self._may_pull(message, len(pulled)):
            return
        if self._pulls is None:
            raise ProtocolError(
                f"{describe(message)} is offered to be pulled, which this process does "
                "not do.\n  Give all processes the same --config.cluster.payloads."
            )
        pulled.add(message)
        for address, number, keys in incoming.offers:
            wanted = [
                pieces.wanted(key, incoming.expected, self._process) for key in keys
            ]
            arrays = self._pulls.pull(address, number, wanted)
            incoming.parts.update(zip(keys, arrays, strict=True))
        incoming.offers.clear()

    def _may_pull(self, message: Name, num_pulled: int) -> bool:
        if num_pulled < self._max_pulls or isinstance(message, Tied):
            return True
        edge = _edge(message)
        there = [m for m in (*self._incoming, *self._payloads) if _edge(m) == edge]
        return message == min(there)


def _nothing(message: Name) -> Expected:
    raise KeyError(message)


def _is_here(part: Any) -> bool:
    return isinstance(part, np.ndarray) or bool(part.is_ready())


def _edge(message: Name) -> tuple[int, ...]:
    """Returns what names the edge and the direction of a message."""
    if isinstance(message, Tied):
        return (message.group, message.source, message.to)
    return (message.source.stage, message.to)
