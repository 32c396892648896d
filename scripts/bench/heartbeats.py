"""What the heartbeats of a run take of a core in process 0, measured.

    python scripts/bench/heartbeats.py [--json FILE]

Process 0 is a process of its own, with the `Heartbeat` of a run of so many; `NUM_PEERS`
letter boxes in this one beat for all the others, evenly, as often as such a run does.
The CPU time is that of the whole process 0, with libzmq's threads. What a run adds to
this, more connections, is not in it.
"""

import argparse
import json
import multiprocessing
import os
import pathlib
import time
from multiprocessing.connection import Connection

import tqdm

from rrfp_jax.coordination.cluster import Whereabouts
from rrfp_jax.coordination.heartbeat import Heartbeat, beat_interval_s
from rrfp_jax.transport.mail import Address, Mail

NUM_PEERS = 47
SIZES = (48, 512, 1024, 2048, 4096, 8192, 16384)
MEASURED_S, LOOK_S = 10.0, 0.002
TIMEOUTS_S = (Whereabouts.peer_timeout_s, Whereabouts.stall_timeout_s)


def _first(size: int, pipe: Connection) -> None:
    """Is process 0 of a run of `size`; tells its share of a core between two words."""
    mail = Mail(0, "run")
    pipe.send(mail.address)
    addresses = [mail.address, *(Address(*each) for each in pipe.recv())]
    nobody = [Address("", f"{number:040}") for number in range(len(addresses), size)]
    mail.introduce([*addresses, *nobody])
    heart = Heartbeat(0, size, mail, str, *TIMEOUTS_S, on_fatal=print)
    heart.start()
    pipe.recv()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    pipe.recv()
    took_cpu_s = time.process_time() - began_cpu_s
    pipe.send(took_cpu_s / (time.perf_counter() - began_s))
    os._exit(0)  # the others of its run would not say goodbye


def measure(size: int) -> float:
    """Returns what share of a core process 0 of a run of `size` takes."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    first = context.Process(target=_first, args=(size, there))
    first.start()
    peers = [Mail(number, "run") for number in range(1, NUM_PEERS + 1)]
    zero = Address(*pipe.recv())
    pipe.send([peer.address for peer in peers])
    for peer in peers:
        peer.introduce([zero, *(each.address for each in peers)])
    _beat(peers, NUM_PEERS, NUM_PEERS)  # connects
    pipe.send("begin")
    _beat(peers, (size - 1) / beat_interval_s(size, *TIMEOUTS_S))
    pipe.send("end")
    share: float = pipe.recv()
    first.join()
    for peer in peers:
        peer.close()
    return share


def _beat(peers: list[Mail], beats_per_s: float, most: float = float("inf")) -> None:
    """Beats, and hears the answers, until they are measured or so many."""
    began_s, num_sent, num_heard = time.perf_counter(), 0, 0
    while num_heard < most and (now_s := time.perf_counter() - began_s) < MEASURED_S:
        while num_sent < min(now_s * beats_per_s, most):
            peers[num_sent % NUM_PEERS].send(0, "beat", (num_sent, False))
            num_sent += 1
        num_heard += sum(len(peer.receive()) for peer in peers)
        time.sleep(LOOK_S)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    target = parser.parse_args().json
    found = {size: measure(size) for size in tqdm.tqdm(SIZES, "process 0")}
    for size, share in found.items():
        every_s = beat_interval_s(size, *TIMEOUTS_S)
        print(f"{size:6} processes, a beat each {every_s:4.1f} s: {share:6.1%}")
    if target:
        target.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
