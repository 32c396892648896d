"""Payloads from process to process: through the host, or by the transfer library.

    python scripts/bench/transfers.py [--json FILE]

Two processes on this machine, a pipeline rank each, and the transport with its polls as
the runtime uses them. One way: from the send of a payload that exists until its array
is ready at the receiver, on the one clock of the machine, with nothing else under way.
Rate: of bursts, from the first send to the last array. Rounds of both ways in turn, A B
A B; medians.
"""

import argparse
import json
import multiprocessing
import pathlib
import socket
import statistics
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tqdm

from rrfp_jax.coordination import cluster
from rrfp_jax.core.events import Arrived
from rrfp_jax.core.graph import PipelineGraph, chain_edges
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.runtime import placing, wire
from rrfp_jax.runtime.devices import RealDevices
from rrfp_jax.transport.base import Expected, Message, Name
from rrfp_jax.transport.pulls import Pulls

WAYS = ("host", "transfer")
MIB = 1 << 20


class Payload(NamedTuple):
    """What is sent, and how often.

    Attributes:
      num_bytes: of one.
      num_rounds: that count.
      burst: payloads of a burst.
      num_warm_up: rounds before, that do not count.
    """

    num_bytes: int
    num_rounds: int = 31
    burst: int = 8
    num_warm_up: int = 2


PAYLOADS = {
    "4kib": Payload(4 << 10),
    "256kib": Payload(256 << 10),
    "16mib": Payload(16 << 20),
}


class Round(NamedTuple):
    """What a round has measured."""

    one_way_s: float
    burst_s: float


class End:
    """One of the two processes, with one of the two ways."""

    def __init__(self, joined: cluster.Cluster, number: int, way: wire.Way) -> None:
        assert joined.desk is not None
        firsts = {d.process_index: d for d in reversed(cluster.devices())}
        ranks = [placing.mesh_of([firsts[process]], 1, 1) for process in range(2)]
        self._is_sender = joined.process == 0
        self._source, self._target = (rank.replicated for rank in ranks)
        self._wire = wire.connect(joined.desk, number, ranks, way)

    def measure(self, payload: Payload) -> Round | None:
        """Returns what the receiver has seen; None at the sender."""
        one_way_s = self._step(payload.num_bytes, 1)
        burst_s = self._step(payload.num_bytes, payload.burst)
        return None if self._is_sender else Round(one_way_s, burst_s)

    def _step(self, num_bytes: int, count: int) -> float:
        """Returns the time from the first send to the last array."""
        shape = (num_bytes // 4,)
        payload = [jnp.full(shape, i, jnp.float32) for i in range(count)]
        jax.block_until_ready(payload)

        def expects(name: Name) -> Expected:
            del name
            aval = jax.ShapeDtypeStruct(shape, jnp.float32)
            return Expected([aval], [self._source], [self._target], (0,), (1,))

        graph = PipelineGraph(2, count, chain_edges(2), (0, 1))
        self._wire.transport.begin(expects)
        self._devices = RealDevices(graph, self._wire.transport, time.perf_counter())
        self._wire.all_gather(None)
        at_s = time.perf_counter()
        if self._is_sender:
            self._send(payload)
        else:
            at_s = self._receive(count)
        sent_s, here_s = self._wire.all_gather(at_s)
        return float(here_s - sent_s)

    def _send(self, payload: list[jax.Array]) -> None:
        transport = self._wire.transport
        for j, array in enumerate(payload):
            transport.send(Message(Task(Kind.F, 0, j), 1), [array], [self._target])
            transport.arrived()
        while transport.num_to_post():
            self._turn()

    def _receive(self, count: int) -> float:
        arrays: list[jax.Array] = []
        while len(arrays) < count:
            for message in self._turn():
                arrays += self._wire.transport.take(message)
        jax.block_until_ready(arrays)
        return time.perf_counter()

    def _turn(self) -> list[Message]:
        """Returns what has arrived; if nothing has, after a pause."""
        self._wire.desk.poll()
        told = self._devices.poll()
        if not told:
            self._wire.desk.sleep(self._devices.pause_s())
        return [Message(*t.event) for t in told if isinstance(t.event, Arrived)]


def work(
    there: Any, coordinator: str, process: int, payloads: Mapping[str, Payload]
) -> None:
    """Is one of the two processes; the second one posts its rounds."""
    jax.config.update("jax_num_cpu_devices", 1)
    with cluster.joined(cluster.Whereabouts(coordinator, 2, process)) as joined:
        ways = {"host": wire.Way(), "transfer": wire.Way(Pulls(joined.address))}
        ends = {
            name: End(joined, number, ways[name]) for number, name in enumerate(WAYS)
        }
        for size, payload in payloads.items():
            for _ in range(payload.num_warm_up + payload.num_rounds):
                for name, end in ends.items():
                    there.send((size, name, end.measure(payload)))


def rounds_of(
    payloads: Mapping[str, Payload],
) -> Iterator[tuple[tuple[str, str], Round]]:
    """Yields the rounds as they end, with their size and way; warm-up as well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for process in range(2):
        here, there = context.Pipe()
        arguments = (there, coordinator, process, payloads)
        processes.append(context.Process(target=work, args=arguments))
        processes[-1].start()
        there.close()
        pipes.append(here)
    for _ in range(num_rounds(payloads)):
        pipes[0].recv()
        size, way, found = pipes[1].recv()
        yield (size, way), found
    for each in processes:
        each.join()


def num_rounds(payloads: Mapping[str, Payload]) -> int:
    """Returns how many `rounds_of` yields."""
    counts = [each.num_warm_up + each.num_rounds for each in payloads.values()]
    return len(WAYS) * sum(counts)


def measured() -> dict[tuple[str, str], list[Round]]:
    """Returns the rounds that count, by size and way."""
    rounds: dict[tuple[str, str], list[Round]] = {}
    total = num_rounds(PAYLOADS)
    for key, found in tqdm.tqdm(rounds_of(PAYLOADS), "rounds", total, leave=False):
        rounds.setdefault(key, []).append(found)
    return {key: each[PAYLOADS[key[0]].num_warm_up :] for key, each in rounds.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    rounds, figures = measured(), {}
    print(f"{'payload':>8} {'way':>9} {'one way ms (range)':>26} {'MiB/s':>8}")
    for size, payload in PAYLOADS.items():
        medians = {}
        for way in WAYS:
            one_way_ms = sorted(each.one_way_s * 1e3 for each in rounds[size, way])
            burst_s = statistics.median(each.burst_s for each in rounds[size, way])
            rate = payload.burst * payload.num_bytes / MIB / burst_s
            medians[way] = statistics.median(one_way_ms)
            spread = f"{one_way_ms[0]:.2f} .. {one_way_ms[-1]:.2f}"
            print(f"{size:>8} {way:>9} {medians[way]:9.2f} {spread:>16} {rate:8.0f}")
            figures[f"{way}_{size}_one_way_ms"] = medians[way]
            figures[f"{way}_{size}_mib_per_s"] = rate
        pairs = zip(rounds[size, "host"], rounds[size, "transfer"], strict=True)
        ratio = statistics.median(a.one_way_s / b.one_way_s for a, b in pairs)
        faster, slower = ("transfer", "host") if ratio > 1 else ("host", "transfer")
        times = max(ratio, 1 / ratio)
        print(f"{'':>8} {faster} is faster: {slower} takes {times:.2f} times as long")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
