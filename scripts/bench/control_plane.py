"""What the control plane costs where everybody tells everybody something once a step.

    python scripts/bench/control_plane.py [--json FILE]

Counts what `coordination` and `runtime.outcome` send, for runs of a process a GPU; and
measures what it takes: `NUM_MAILS` letter boxes in one process write to each other, as
the processes of a run do in an all-gather. All times are CPU times, of both ends and of
libzmq's threads, so that other load on the machine matters little. A letter of an
all-gather names all its members; so it is measured for groups of several sizes, with
letters as long as theirs. What follows for a run is arithmetic, not a measurement.

And what it takes to gather the trace of a step, of 64 ranks of 8 processes and 256
microbatches, in the first process of its pipeline: as it is, with the proposals that
each rank's first process has heard, and without them.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import time
from collections.abc import Sequence
from typing import Any

import msgpack
import tqdm

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement, trace_parts
from rrfp_jax.core.events import Arrived, Event, Finished, Proposal, Proposed
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.trace import Span, Told, Trace, Transfer
from rrfp_jax.transport.mail import Mail

NUM_MAILS = 48
NUM_GATHERS = 5
SIZES = (512, 1024, 2048, 4096, 8192, 16384)
NUM_ROUNDS = 1155  # of agreement, a rank and step: scale.py, 8 x 64 x 8, BFW
BEAT_S = 1.0  # between beats, with the default cluster.peer_timeout_s


def counts(tensor: int, ranks: int, replicas: int) -> dict[str, int]:
    """Returns who tells how many once a step, and the connections that takes.

    Each process tells all others of its pipeline twice: that a step begins, and what
    came of it; and all of the run twice, its norms and whether to stop, or with
    replicas four times: tokens and losses. So all are connected with all, by one
    connection a direction. Beside that, everybody beats to process 0.

    Args:
      tensor: processes of a rank.
      ranks: of a pipeline.
      replicas: pipelines.
    """
    processes = tensor * ranks * replicas
    in_run, in_pipeline = processes - 1, tensor * ranks - 1
    letters = (4 if replicas > 1 else 2) * in_run + 2 * in_pipeline
    neighbours = (tensor - 1) + min(2, ranks - 1)  # of the group, and before and after
    return {
        "gather_letters_a_process": letters,
        "gather_letters": letters * processes,
        "connections_a_process": 2 * in_run + 2,
        "connections": (in_run + 2) * processes - 2,
        "connections_without_gathers": 2 * neighbours + 2,
        "beats_per_s": round(2 * in_run / BEAT_S),
    }


def _exchange(mails: Sequence[Mail], number: int, size: int) -> None:
    """Lets everybody tell everybody a number, in letters for a group of `size`."""
    key = (tuple(range(size)), number)
    for mail in mails:
        for to in range(len(mails)):
            if mail is not mails[to]:
                mail.send(to, "gather", key, [msgpack.packb(1.5)])
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
    _exchange(mails, 0, NUM_MAILS)
    found = {
        "connection_ms": (time.process_time() - began_s) / connections * 1e3,
        "connection_descriptors": (_num_descriptors() - descriptors) / connections,
        "connection_kib": (_resident_kib() - resident_kib) / connections,
    }
    for size in tqdm.tqdm((NUM_MAILS, *SIZES), "letters"):
        began_s = time.process_time()
        for number in range(NUM_GATHERS):
            _exchange(mails, number, size)
        each_s = (time.process_time() - began_s) / NUM_GATHERS / connections
        found[f"letter_us_{size}"] = each_s * 1e6
    for mail in mails:
        mail.close()
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
        in_run, small_us = size - 1, found[f"letter_us_{NUM_MAILS}"]
        result.append(
            {
                "processes": size,
                "connections_a_process": counted["connections_a_process"],
                "descriptors": round(in_run * found["connection_descriptors"]),
                "memory_mib": in_run * found["connection_kib"] / 1024,
                "connect_cpu_s": in_run * found["connection_ms"] / 1e3,
                "all_gather_cpu_s": in_run * found[f"letter_us_{size}"] / 1e6,
                "with_short_names_s": in_run * small_us / 1e6,
                "beats_cpu_s_per_s": counted["beats_per_s"] * small_us / 1e6,
            }
        )
    return result


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    target = parser.parse_args().json
    found = measure_trace() | measure()
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
