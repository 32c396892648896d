"""What the control plane costs where everybody tells everybody something once a step.

    python scripts/bench/control_plane.py [--json FILE]

Counts what `coordination` and `runtime.outcome` send, for runs of a process a GPU; and
measures what it takes. All times are CPU times, of whole processes, libzmq's threads
included, so that other load on the machine matters little (heartbeats: heartbeats.py):

* a connection and a letter, both ends, among `NUM_MAILS` letter boxes in one process;
* an all-gather, among as many processes as there are letter boxes, of values that are
  together as long as one number from each process of a larger run.

A process takes part with at most 9 others in a gather of any size, so the second is
what one of a larger run takes, but that its tree is deeper: the slowest way through it
is longer, which CPU times do not show. What follows for a run is arithmetic.

And what it takes to gather the trace of a step, of 64 ranks of 8 processes and 256
microbatches, in the first process of its pipeline: as it is, with the proposals that
each rank's first process has heard, and without them.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgpack
import tqdm

from rrfp_jax.coordination import tree
from rrfp_jax.coordination.desk import LARGEST_DIRECT, Desk
from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement, trace_parts
from rrfp_jax.core.events import Arrived, Event, Finished, Proposal, Proposed
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.trace import Span, Told, Trace, Transfer
from rrfp_jax.transport.mail import Address, Mail

NUM_MAILS = 48
NUM_GATHERS = 20
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
NUM_ROUNDS = 1155  # of agreement, a rank and step: scale.py, 8 x 64 x 8, BFW


def counts(tensor: int, ranks: int, replicas: int) -> dict[str, int]:
    """Returns who tells how many once a step, and the connections that takes.

    All processes of a pipeline gather twice, that a step begins and what came of it;
    and all of the run twice, norms and whether to stop, or with replicas four times:
    tokens and losses. Each goes through the tree of the group. Beside that, the first
    process of each pipeline hears of all its traces, and everybody beats to process 0.
    A connection is one direction of a pair. What is counted of a process is the most
    that one has; of connections, without the first processes of pipelines.

    Args:
      tensor: processes of a rank.
      ranks: of a pipeline.
      replicas: pipelines.
    """
    # Here, since it loads JAX: scale.py is to measure its own memory.
    from rrfp_jax.coordination import cluster, heartbeat

    processes, piped = tensor * ranks * replicas, tensor * ranks
    gathers = 4 if replicas > 1 else 2
    in_pipeline = [_neighbours(member, piped) for member in range(piped)]
    letters, peers = [], []  # by process
    for process in range(processes):
        first, member = process - process % piped, process % piped
        in_run = _neighbours(process, processes)
        letters.append(gathers * len(in_run) + 2 * len(in_pipeline[member]))
        peers.append(len(in_run | {first + each for each in in_pipeline[member]}))
    beats = 2 * (processes - 1)  # and answers
    interval_s = heartbeat.beat_interval_s(
        processes,
        cluster.Whereabouts.peer_timeout_s,
        cluster.Whereabouts.stall_timeout_s,
    )
    most = max(count for process, count in enumerate(peers) if process % piped)
    beside = (tensor - 1) + min(2, ranks - 1)  # of the group, and before and after
    return {
        "gather_letters_a_process": max(letters),
        "gather_letters": sum(letters),
        "connections_a_process": 2 * most + 3,  # one of traces, two of beats
        "connections_of_process_0": 2 * peers[0] + piped - 1 + beats,
        "connections": sum(peers) + replicas * (piped - 1) + beats,
        "connections_without_gathers": 2 * beside + 2,
        "beats_per_s": round(beats / interval_s),
    }


def _neighbours(member: int, size: int) -> set[int]:
    """Returns whom a member of a group of `size` writes to in an all-gather."""
    if size <= LARGEST_DIRECT:
        return set(range(size)) - {member}
    parent, children = tree.place_of(member, size)
    return {*children} | ({parent} if parent is not None else set())


def _exchange(mails: Sequence[Mail], number: int) -> None:
    """Lets everybody tell everybody a number."""
    for mail in mails:
        for to in range(len(mails)):
            if mail is not mails[to]:
                mail.send(to, "gather", (bytes(12), number), [msgpack.packb(1.5)])
    missing = [len(mails) - 1] * len(mails)
    while any(missing):
        for to, mail in enumerate(mails):
            missing[to] -= len(mail.receive())


def _num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _resident_kib() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1024


def measure() -> dict[str, float]:
    """Measures what connections and letters take."""
    mails = [Mail(number, "run") for number in range(NUM_MAILS)]
    for mail in mails:
        mail.introduce([each.address for each in mails])
    connections = NUM_MAILS * (NUM_MAILS - 1)
    descriptors, resident_kib = _num_descriptors(), _resident_kib()
    began_s = time.process_time()
    _exchange(mails, 0)
    found = {
        "connection_ms": (time.process_time() - began_s) / connections * 1e3,
        "connection_descriptors": (_num_descriptors() - descriptors) / connections,
        "connection_kib": (_resident_kib() - resident_kib) / connections,
    }
    began_s = time.process_time()
    for number in range(NUM_GATHERS):
        _exchange(mails, number)
    each_s = (time.process_time() - began_s) / NUM_GATHERS / connections
    found["letter_us"] = each_s * 1e6
    for mail in mails:
        mail.close()
    return found


def _gather(number: int, pipe: Connection) -> None:
    """Is one of the processes that gather; tells what it took, by size."""
    mail = Mail(number, "run")
    pipe.send(mail.address)
    mail.introduce([Address(*each) for each in pipe.recv()])
    desk = Desk(number, mail, lambda: None)
    found_s = []
    for size in SIZES:
        value = (1.5,) * (size // NUM_MAILS)
        for count in range(-1, NUM_GATHERS):
            if not count:  # the first one has connected
                began_s = time.process_time()
            desk.all_gather(value, range(NUM_MAILS))
        found_s.append((time.process_time() - began_s) / NUM_GATHERS)
    pipe.send(found_s)
    pipe.recv()  # until all are done
    mail.close()


def measure_gathers() -> dict[str, float]:
    """Measures an all-gather through a tree; the busiest process is its root."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes = [context.Pipe() for _ in range(NUM_MAILS)]
    members = [
        context.Process(target=_gather, args=(number, there))
        for number, (_, there) in enumerate(pipes)
    ]
    for member in members:
        member.start()
    here = [pipe for pipe, _ in pipes]
    addresses = [pipe.recv() for pipe in here]
    for pipe in here:
        pipe.send(addresses)
    took = [pipe.recv() for pipe in tqdm.tqdm(here, "all-gathers")]
    for pipe, member in zip(here, members, strict=True):
        pipe.send(None)
        member.join()
    found = {}
    for size, each_s in zip(SIZES, zip(*took, strict=True), strict=True):
        found[f"all_gather_ms_{size}"] = statistics.mean(each_s) * 1e3
        found[f"all_gather_root_ms_{size}"] = max(each_s) * 1e3
    return found


def _part(graph: PipelineGraph, rank: int, rounds: int) -> trace_parts.Part:
    """Returns what the first of the 8 processes of a rank sends of its trace."""
    trace, tasks = Trace(graph), graph.tasks(rank)
    sources = [
        (source, task.stage)
        for task in tasks
        for source in graph.inputs(task)
        if graph.rank_of(source) != rank
    ]
    trace.spans += [Span(task, rank, i / 7, i / 7) for i, task in enumerate(tasks)]
    trace.transfers += [Transfer(*each, i / 7, i / 7) for i, each in enumerate(sources)]
    told: list[Event] = [Finished(task) for task in tasks]
    told += [Arrived(*each) for each in sources]
    told += [
        Proposed(member, Proposal(number, tuple(tasks[number : number + 1]), 1))
        for number in range(rounds)
        for member in range(1, 8)
    ]
    trace.log += [Told(i / 7, rank, event) for i, event in enumerate(told)]
    return trace_parts.pack(trace, [rank])


def measure_trace() -> dict[str, float]:
    """Measures the letters of a trace, and what it takes to put them together."""
    graph = graphs.chain(256, placement.one_each(64), is_split=True)
    found = {}
    for name, rounds in (("trace", NUM_ROUNDS), ("trace_without_proposals", 0)):
        packed = [msgpack.packb(_part(graph, rank, rounds)) for rank in range(64)]
        found[f"{name}_letter_kib"] = statistics.mean(map(len, packed)) / 1024
        began_s = time.process_time()
        whole = Trace(graph)
        parts = [msgpack.unpackb(each, use_list=False) for each in packed]
        trace_parts.complete(whole, parts)
        found[f"{name}_cpu_s"] = time.process_time() - began_s
    return found


def rows(found: dict[str, float]) -> list[dict[str, Any]]:
    """Returns what follows for runs of 8 (TP) x 64 (PP) x replicas processes."""
    result = []
    for size in SIZES:
        counted = counts(8, 64, size // 512)
        connections = counted["connections_a_process"]
        result.append(
            {
                "processes": size,
                "connections_a_process": connections,
                "descriptors": round(connections / 2 * found["connection_descriptors"]),
                "memory_mib": connections / 2 * found["connection_kib"] / 1024,
                "descriptors_of_first": round(
                    counted["connections_of_process_0"]
                    / 2
                    * found["connection_descriptors"]
                ),
                "connect_cpu_ms": connections / 2 * found["connection_ms"],
                "all_gather_cpu_ms": found[f"all_gather_ms_{size}"],
                "of_its_root_ms": found[f"all_gather_root_ms_{size}"],
            }
        )
    return result


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    target = parser.parse_args().json
    found = measure_trace() | measure() | measure_gathers()
    for name, value in found.items():
        print(f"{name:24} {value:9.2f}")
    table = rows(found)
    print(" ".join(name.rjust(22) for name in table[0]))
    for row in table:
        print(" ".join(f"{value:22.6g}" for value in row.values()))
    if target:
        target.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
