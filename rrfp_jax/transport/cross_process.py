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

Receive buffers are bounded. A rank's cotangents are bounded by what it has in flight
itself, activations by what their sender has in flight. Nothing holds back a sender that
has no backward, such as a frozen tower; so of each edge no more than `max_pulls`
payloads are pulled before one is taken, but for the lowest microbatch that is there,
for which the other edge of a join may wait.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport import codec, pieces
from rrfp_jax.transport.base import Arrival, Expected, Message, Name, Tied
from rrfp_jax.transport.in_process import InProcess
from rrfp_jax.transport.mail import Letter, Mail
from rrfp_jax.transport.pieces import Box
from rrfp_jax.transport.pulls import Pulls

Key = tuple[int, Box]  # which array of the payload, and which part of it


class Part(NamedTuple):
    """A part of a payload at its sender: one device has it."""

    key: Key
    data: Any  # a jax.Array; its type stub lacks `is_ready`


@dataclasses.dataclass
class _Incoming:
    """A message that this process expects, and what is here of it.

    Attributes:
      expected: what the step says it is to bring.
      missing: parts of which no letter has told yet.
      parts: arrays, on the host or on a device of this process; perhaps under way.
      offers: what may be pulled and is not yet.
      due_s: see `Transport.send`.
      senders: who has told of it.
    """

    expected: Expected
    missing: set[Key]
    parts: dict[Key, Any] = dataclasses.field(default_factory=dict)
    offers: list[tuple[str, int, list[Key]]] = dataclasses.field(default_factory=list)
    due_s: float | None = None
    senders: set[int] = dataclasses.field(default_factory=set)


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
        # By edge, payloads that are pulled and not taken.
        self._num_pulled: collections.Counter[tuple[int, ...]] = collections.Counter()

    def begin(self, expects: Callable[[Name], Expected]) -> None:
        """Starts the next step, with the letters of it that are here already."""
        self._near.begin(expects)
        self._step += 1
        self._expects = functools.cache(expects)
        self._sent.clear()
        self._known.clear()
        self._num_pulled.clear()
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
            raise ProtocolError(f"{_print(message)} was sent twice.")
        self._sent.add(message)
        expected = self._expects(message)
        if {*expected.senders, *expected.receivers} == {self._process}:
            self._near.send(message, payload, shardings)
            return
        for receiver, keys in _shares(expected, self._process).items():
            parts = [
                Part(key, _on_device(payload[key[0]], sender)) for key, sender in keys
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
                self._payloads[message] = _assembled(incoming)
                found.append(Arrival(message, incoming.due_s))
        return found

    def has(self, message: Name) -> bool:
        """Whether it is here."""
        return message in self._payloads or self._near.has(message)

    def take(self, message: Name) -> list[jax.Array]:
        """Hands over a payload."""
        if message not in self._payloads:
            return self._near.take(message)
        edge = _edge(message)
        if self._num_pulled[edge]:
            self._num_pulled[edge] -= 1
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
        step, *name, due_s, sample_ids, address, number, parts = letter.body
        message = _read_name(name)
        if step > self._step:
            self._held.setdefault(step, []).append(letter)
            return
        where = f"{_print(message)} of step {step}, from process {letter.sender}"
        if step < self._step:
            raise ProtocolError(f"{where}, comes in step {self._step}: too late.")
        incoming = self._expect(message, where)
        if letter.sender in incoming.senders:
            raise ProtocolError(f"{where}, came twice.")
        incoming.senders.add(letter.sender)
        if due_s is not None:
            incoming.due_s = max(due_s, incoming.due_s or due_s)
        expected = incoming.expected
        if sample_ids != expected.sample_ids:
            raise ProtocolError(
                f"{where}, was computed from the samples {sample_ids}; here that "
                f"microbatch is {expected.sample_ids}.\n  Give all processes the same "
                "data, and the same --config.data.seed."
            )
        frames = iter(letter.frames)
        pulled: list[Key] = []
        for index, box, header in parts:
            key = (index, box)
            _check_part(key, codec.read_header(header), incoming, where)
            incoming.missing.remove(key)
            if address is None:
                found = codec.read_header(header)
                incoming.parts[key] = codec.read_array(found, next(frames))
            else:
                pulled.append(key)
        if pulled:
            incoming.offers.append((address, number, pulled))
            self._pull(message, incoming)

    def _post(
        self,
        receiver: int,
        message: Name,
        expected: Expected,
        parts: Sequence[Part],
        due_s: float | None,
    ) -> None:
        """Sends one process its parts of a message, all of them in one way."""
        head = [self._step, *_pack_name(message), due_s, expected.sample_ids]
        told = [
            (*part.key, codec.pack_header(part.data.dtype, part.data.shape))
            for part in parts
        ]
        num_bytes = sum(part.data.nbytes for part in parts)
        goes_out = receiver != self._process
        if self._pulls and goes_out and num_bytes > self._host_limit_bytes:
            number = self._pulls.offer([part.data for part in parts])
            body = [*head, self._pulls.address, number, told]
            self._mail.send(receiver, self._kind, body)
        else:
            body = [*head, None, 0, told]
            self._outgoing.append(_Outgoing(receiver, body, list(parts)))

    def _expect(self, message: Name, where: str) -> _Incoming:
        found = self._incoming.get(message)
        if found is None:
            if message in self._known:
                raise ProtocolError(f"{where}, came twice.")
            self._known.add(message)
            try:
                expected = self._expects(message)
            except KeyError as error:
                raise ProtocolError(f"{where}, is not expected here.") from error
            missing = set(_needed(expected, self._process))
            found = self._incoming[message] = _Incoming(expected, missing)
        return found

    def _pull(self, message: Name, incoming: _Incoming) -> None:
        """Begins to pull what is offered, unless too much is here already."""
        edge = _edge(message)
        if not self._may_pull(message, edge):
            return
        assert self._pulls is not None, "a peer offers what this process cannot pull"
        self._num_pulled[edge] += 1
        for address, number, keys in incoming.offers:
            wanted = [_wanted(key, incoming.expected) for key in keys]
            arrays = self._pulls.pull(address, number, wanted)
            incoming.parts.update(zip(keys, arrays, strict=True))
        incoming.offers.clear()

    def _may_pull(self, message: Name, edge: tuple[int, ...]) -> bool:
        if self._num_pulled[edge] < self._max_pulls or isinstance(message, Tied):
            return True
        there = [m for m in (*self._incoming, *self._payloads) if _edge(m) == edge]
        return message == min(there)


def _nothing(message: Name) -> Expected:
    raise KeyError(message)


def _is_here(part: Any) -> bool:
    return isinstance(part, np.ndarray) or bool(part.is_ready())


def _all_pieces(expected: Expected) -> Iterator[tuple[int, pieces.Piece]]:
    rows = zip(expected.avals, expected.sources, expected.targets, strict=True)
    for index, (aval, source, target) in enumerate(rows):
        for piece in pieces.pieces(source, target, aval.shape):
            yield index, piece


def _shares(
    expected: Expected, process: int
) -> Mapping[int, list[tuple[Key, jax.Device]]]:
    """Returns, by receiver, what this process is to send, and from which device."""
    found: dict[int, list[tuple[Key, jax.Device]]] = {}
    if not expected.avals and process == expected.senders[0]:
        return {receiver: [] for receiver in expected.receivers}  # it has come to be
    for index, piece in _all_pieces(expected):
        if piece.sender.process_index == process:
            share = found.setdefault(piece.receiver, [])
            share.append(((index, piece.box), piece.sender))
    return found


def _needed(expected: Expected, process: int) -> list[Key]:
    """Returns what this process is to be sent."""
    return [
        (index, piece.box)
        for index, piece in _all_pieces(expected)
        if piece.receiver == process
    ]


def _on_device(array: jax.Array, device: jax.Device) -> Any:
    if array.is_fully_addressable and len(array.sharding.device_set) == 1:
        return array
    return next(s.data for s in array.addressable_shards if s.device == device)


def _wanted(key: Key, expected: Expected) -> jax.ShapeDtypeStruct:
    """Returns a part as it is pulled: onto one device here that needs it."""
    index, box = key
    aval, target = expected.avals[index], expected.targets[index]
    mine = [
        (device, need)
        for device, need in pieces.boxes(target, aval.shape)
        if device.process_index == jax.process_index()
    ]
    needing = [device for device, need in mine if need == box]
    device = needing[0] if needing else mine[0][0]
    return jax.ShapeDtypeStruct(
        pieces.shape_of(box),
        aval.dtype,
        sharding=jax.sharding.SingleDeviceSharding(device),
    )


def _assembled(incoming: _Incoming) -> list[jax.Array]:
    expected = incoming.expected
    by_array: list[dict[Box, Any]] = [{} for _ in expected.avals]
    for (index, box), part in incoming.parts.items():
        by_array[index][box] = part
    rows = zip(by_array, expected.targets, expected.avals, strict=True)
    return [pieces.assemble(*row) for row in rows]


def _check_part(
    key: Key, header: codec.ArrayHeader, incoming: _Incoming, where: str
) -> None:
    index, box = key
    avals = incoming.expected.avals
    if key not in incoming.missing:
        known = [(aval.dtype.name, aval.shape) for aval in avals]
        raise ProtocolError(
            f"{where}, brings {header.dtype.name}{list(header.shape)} as array {index} "
            f"at {box}; expected are {known}."
        )
    wanted = (avals[index].dtype, pieces.shape_of(box))
    if header != wanted:
        raise ProtocolError(
            f"{where}, has {header.dtype.name}{list(header.shape)} for array {index}; "
            f"expected {wanted[0].name}{list(wanted[1])}."
        )


def _edge(message: Name) -> tuple[int, ...]:
    """Returns what names the edge and the direction of a message."""
    if isinstance(message, Tied):
        return (message.group, message.source, message.to)
    return (message.source.stage, message.to)


def _pack_name(message: Name) -> list[Any]:
    if isinstance(message, Tied):
        return ["tied", list(message)]
    return ["task", [message.source, message.to]]


def _read_name(name: Sequence[Any]) -> Name:
    match name:
        case ("tied" | "task" as what, fields):
            if what == "tied":
                return Tied(*fields)
            source, to = fields
            return Message(codec.read_task(source), to)
    raise ProtocolError(f"A peer sent {name!r} for the name of a message.")


def _print(message: Name) -> str:
    if isinstance(message, Tied):
        what = "gradient" if message.is_gradient else "value"
        return f"the {what} of tied parameter {message.group} for copy {message.to}"
    _, stage, microbatch = message.source
    return (
        f"{message.source} (stage {stage}, microbatch {microbatch}) for stage "
        f"{message.to}"
    )
