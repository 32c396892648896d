"""Both ends of a transport, in this process or in two others, driven in one way.

A `Node` is one end: the transport of one process, and what its tests do there. `Far` is
a node in another process: the same methods, called by message. `Bring` says what a
message brings in terms that every process knows.
"""

import dataclasses
import gc
import multiprocessing
import os
import secrets
import time
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from rrfp_jax.coordination.desk import Desk
from rrfp_jax.runtime import placing
from rrfp_jax.transport.base import Arrival, Expected, Name, Transport
from rrfp_jax.transport.cross_process import CrossProcess
from rrfp_jax.transport.in_process import InProcess
from rrfp_jax.transport.mail import Address, Mail
from rrfp_jax.transport.pulls import Pulls

PATIENCE_S = 30.0  # how long a test waits in vain; no assertion depends on it
PAUSE_S = 1e-3
LATE = 9.0  # the late value


class Place(NamedTuple):
    """Where values lie: devices, by their places in the list of all, and their mesh."""

    devices: tuple[int, ...]
    data: int = 1
    spec: tuple[str | None, ...] | None = None  # by default as an activation's

    def rank(self) -> placing.RankMesh:
        everywhere = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
        found = [everywhere[i] for i in self.devices]
        return placing.mesh_of(found, self.data, len(found) // self.data)

    def of(self, shape: Sequence[int]) -> jax.sharding.Sharding:
        if self.spec is None:
            return self.rank().of_value(shape)
        return self.rank().of_parameter(PartitionSpec(*self.spec), shape)


class Bring(NamedTuple):
    """What a message brings: values, as NumPy has them, from one place to another."""

    values: Sequence[Any]
    source: Place
    target: Place
    sample_ids: tuple[int, ...] = ()

    def expected(self) -> Expected:
        avals = [jax.eval_shape(_made, value) for value in self.values]
        shapes = [aval.shape for aval in avals]
        return Expected(
            avals,
            [self.source.of(shape) for shape in shapes],
            [self.target.of(shape) for shape in shapes],
            self.source.rank().processes,
            self.target.rank().processes,
            self.sample_ids,
        )


class Key(NamedTuple):
    """Stands for a random key among values."""

    seed: int


def _made(value: Any) -> jax.Array:
    return jax.random.key(value.seed) if isinstance(value, Key) else jnp.asarray(value)


@dataclasses.dataclass(frozen=True)
class Taken:
    """An array that arrived, seen from a process: its parts there by device."""

    dtype: str
    shape: tuple[int, ...]
    is_as_expected: bool  # its sharding and type
    parts: dict[tuple[tuple[int, int], ...], np.ndarray]  # by box
    num_parts: int

    def whole(self) -> np.ndarray:
        """Returns the value, if all of it is in this process."""
        first = next(iter(self.parts.values()))
        found, is_set = np.empty(self.shape, first.dtype), np.zeros(self.shape, bool)
        for box, part in self.parts.items():
            at = tuple(slice(*each) for each in box)
            found[at], is_set[at] = part, True
        assert is_set.all()
        return found


class Node:
    """One end of a transport."""

    def __init__(self, process: int = 0, num_processes: int = 1) -> None:
        self.process = process
        self._mail = Mail(process, "run")
        self._desk = Desk(process, self._mail, lambda: None)
        self.is_alone = num_processes == 1
        if self.is_alone:
            self.introduce([self._mail.address])
        self._pulls: Pulls | None = None
        self._num_opened = 0
        self._way = ""
        self.transport: Transport = InProcess()
        self._table: dict[Name, Bring] = {}
        self._late: Any = None
        self._late_number = 0
        self._letters: list[Any] = []
        self._watched: dict[Name, list[weakref.ref[Any]]] = {}
        self._found: list[Arrival] = []

    def address(self) -> Address:
        return self._mail.address

    def introduce(self, addresses: Sequence[Address]) -> None:
        self._mail.introduce(addresses)

    def close(self) -> None:
        self._mail.close()

    def open(self, way: str, max_pulls: int = 32, host_limit_bytes: int = 0) -> None:
        """Begins with a new transport, and its first step without any messages."""
        self._num_opened += 1
        self._way, self._table, self._watched = way, {}, {}
        if way == "in_process":
            self.transport = InProcess()
            return
        pulls = self._server() if way == "transfer" else None
        kind = f"payload {self._num_opened}"
        transport = CrossProcess(self._mail, kind, pulls, host_limit_bytes, max_pulls)
        self._desk.handle(kind, transport.on_letter)
        self.transport = transport

    def begin(self, table: dict[Name, Bring]) -> None:
        self._table = table
        self.transport.begin(self._expects)

    def expect(self, table: dict[Name, Bring]) -> None:
        """Takes other messages for those of the present step."""
        self._table = table
        assert isinstance(self.transport, CrossProcess)
        self.transport._expects = self._expects

    def _expects(self, name: Name) -> Expected:
        expected = self._table[name].expected()
        if self._way == "letters":
            # As if another process had a part in the sender: so it goes by letter.
            return expected._replace(senders=(0, 1))
        return expected

    def send(self, name: Name, is_late: bool = False, is_donated: bool = False) -> None:
        """Sends what the table says; late: once the late value exists."""
        expected = self._expects(name)
        if is_late:
            payload = jax.device_put([self._late], expected.sources)
        else:
            payload = self._make(name)
        self._watch(name, payload)
        self.transport.send(name, payload, expected.targets)
        if is_donated:
            jax.block_until_ready(payload)
            self._found += self.transport.arrived()
            for array in payload:
                _overwritten(array).block_until_ready()

    def _make(self, name: Name) -> list[jax.Array]:
        made = [_made(value) for value in self._table[name].values]
        payload: list[jax.Array] = placing.put(made, self._expects(name).sources)
        return jax.block_until_ready(payload)

    def _watch(self, name: Name, arrays: Sequence[jax.Array]) -> None:
        self._watched.setdefault(name, []).extend(map(weakref.ref, arrays))

    def arrived(self) -> list[Name]:
        """Reads the mail, and returns what has arrived."""
        self._desk.poll()
        found, self._found = [*self._found, *self.transport.arrived()], []
        return [arrival.message for arrival in found]

    def flush(self) -> None:
        """Lets go all that was sent, but reads no mail."""
        assert isinstance(self.transport, CrossProcess)
        while self.transport.flush():
            time.sleep(PAUSE_S)

    def read_letters(self, count: int) -> None:
        """Waits until so many letters more have been taken in."""
        deadline_s = time.monotonic() + PATIENCE_S
        while count > 0:
            letters = self._mail.receive()
            count -= len(letters)
            for letter in letters:
                self._letters.append(letter)
                self._desk._handlers[letter.kind](letter)
            assert time.monotonic() < deadline_s, f"{count} letters did not come"
            self._mail.wait(PAUSE_S)

    def post(self, to: int, body: Any) -> None:
        """Writes a letter that is none of the transport's own."""
        self._mail.send(to, f"payload {self._num_opened}", body)

    def read_again(self) -> None:
        """Takes in the last letter that was read with `read_letters` once more."""
        letter = self._letters[-1]
        self._desk._handlers[letter.kind](letter)

    def take(self, name: Name) -> list[Taken]:
        expected, taken = self._table[name].expected(), self.transport.take(name)
        self._watch(name, taken)
        rows = zip(taken, expected.avals, expected.targets, strict=True)
        return [_seen(*row) for row in rows]

    def has(self, name: Name) -> bool:
        return self.transport.has(name)

    def num_in_transit(self) -> int:
        return self.transport.num_in_transit()

    def num_pulled(self) -> int:
        """Returns how many payloads are pulled and not taken."""
        assert isinstance(self.transport, CrossProcess)
        return sum(map(len, self.transport._pulled.values()))

    def num_alive(self, name: Name) -> int:
        """Returns how many of the arrays that were sent or taken there still are."""
        gc.collect()
        return sum(reference() is not None for reference in self._watched.get(name, ()))

    def begin_late(self) -> None:
        """Begins a value that does not exist before `let_late_come`.

        It pulls from its own process what is not offered yet. (A long program would be
        as long as the machine is slow, and whatever else the device does would wait.)
        """
        pulls, self._late_number = self._server(), secrets.randbits(63)
        aval = jax.ShapeDtypeStruct((), jnp.float32, sharding=_first_device())
        (self._late,) = pulls.pull(pulls.address, self._late_number, [aval])

    def is_late_here(self) -> bool:
        """Whether its value exists."""
        return bool(self._late.is_ready())

    def let_late_come(self) -> None:
        """Lets it be `LATE`."""
        value = jax.device_put(np.float32(LATE), _first_device())
        self._server()._server.await_pull(self._late_number, [value])

    def _server(self) -> Pulls:
        if self._pulls is None:
            self._pulls = Pulls("127.0.0.1")
        return self._pulls


def _first_device() -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _overwritten(array: jax.Array) -> jax.Array:
    return jax.jit(lambda x: x * 0 + 77, donate_argnums=0)(array)


def _seen(array: Any, aval: Any, target: jax.sharding.Sharding) -> Taken:
    is_right = (array.dtype, array.shape, array.sharding) == (
        aval.dtype,
        aval.shape,
        target,
    )
    plain, dtype = array, str(array.dtype)
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        plain = jax.random.key_data(array)
    shards = plain.addressable_shards
    parts = {
        tuple(
            cut.indices(size)[:2]
            for cut, size in zip(shard.index, plain.shape, strict=True)
        ): np.array(shard.data)
        for shard in shards
    }
    return Taken(dtype, plain.shape, is_right, parts, len(shards))


class Far:
    """A node in another process; has its methods."""

    def __init__(self, process: int, num_processes: int, coordinator: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, process, num_processes, coordinator)
        )
        self._process.start()
        there.close()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            self.start(name, *arguments, **options)
            return self.finish()

        return call

    def start(self, name: str, *arguments: Any, **options: Any) -> None:
        """Calls a method, without waiting for it."""
        self._here.send((name, arguments, options))

    def finish(self) -> Any:
        """Returns what the method that was started returns."""
        assert self._here.poll(2 * PATIENCE_S), "the other process does not answer"
        is_error, result = self._here.recv()
        if is_error:
            raise result
        return result

    def close(self) -> None:
        """Ends the process."""
        self._here.close()
        self._process.join(PATIENCE_S)
        if self._process.is_alive():
            self._process.kill()
        self._process.join()


def _serve(there: Any, process: int, num_processes: int, coordinator: str) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes, process)
    jax.devices()  # which waits for the other processes
    node = Node(process, num_processes)
    while True:
        try:
            name, arguments, options = there.recv()
        except EOFError:
            break
        try:
            answer = (False, getattr(node, name)(*arguments, **options))
        except Exception as error:
            answer = (True, error)
        there.send(answer)
    node.close()
    os._exit(0)  # an orderly end of `jax.distributed` would wait for the others


class Link:
    """Two nodes, or one that is both, with a new transport.

    Attributes:
      way: how payloads go.
      nodes: by process; the devices 0 and 1 are the first one's, 2 and 3 the last's.
    """

    def __init__(
        self, way: str, nodes: Sequence[Any], max_pulls: int = 32, **options: Any
    ) -> None:
        self.way = way
        self.nodes = tuple(nodes)
        self._found: list[list[Name]] = [[] for _ in nodes]
        for node in nodes:
            node.open(way, max_pulls, **options)

    @property
    def one(self) -> Any:
        """Has the devices 0 and 1."""
        return self.nodes[0]

    @property
    def two(self) -> Any:
        """Has the devices 2 and 3."""
        return self.nodes[-1]

    def begin(self, table: dict[Name, Bring]) -> None:
        """Starts a step on both."""
        for node in self.nodes:
            node.begin(table)

    def wait_for(self, count: int, at: int = -1) -> list[Name]:
        """Returns what arrives next at a node, so much at least, while both go on."""
        deadline_s = time.monotonic() + PATIENCE_S
        while len(self._found[at]) < count:
            for node, found in zip(self.nodes, self._found, strict=True):
                found += node.arrived()
            assert time.monotonic() < deadline_s, f"only {self._found[at]} came"
            time.sleep(PAUSE_S)
        arrived, self._found[at] = self._found[at], []
        return arrived

    def takers(self, target: Place) -> list[Any]:
        """Returns the nodes that have a part in a place."""
        if len(self.nodes) == 1:
            return [self.one]
        return [
            node
            for process, node in enumerate(self.nodes)
            if any(device // 2 == process for device in target.devices)
        ]
