"""How fast the simulator is, against the heap that any event simulator needs.

    python scripts/bench/simulator_speed.py [--json FILE]

Two figures for whole backwards (BF) and two for split ones (BFW), each the median over
repeats in which the works take turns:

* ratio_to_heapq: simulating 64 ranks x 256 microbatches (lognormal tasks and transfers)
  over pushing and then popping as many (float, int) tuples on a plain heapq as the
  simulation pushes: one a task and one a transfer. Bar: 10.
* growth_64_to_1024: time of a task with 1024 microbatches over that with 64, on 64
  ranks. Bar: 1.3.
"""

import argparse
import heapq
import json
import pathlib
import random
import statistics
import time
from collections.abc import Callable

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement
from rrfp_jax.core.policies import Policy
from rrfp_jax.sim import costs, simulator

_NUM_RANKS = 64
_REPEATS = 5
_BARS = {"ratio_to_heapq": 10.0, "growth_64_to_1024": 1.3}


def simulation(num_microbatches: int, policy: Policy) -> Callable[[], object]:
    """Returns one simulation, ready to run."""
    graph = graphs.chain(num_microbatches, placement.one_each(_NUM_RANKS))
    drawn = costs.constant(graph, 0.010, 0.010, 0.001, weight_s=0.010)
    drawn = costs.with_lognormal(drawn, 0.3, seed=0)
    drawn = costs.with_lognormal_transfers(drawn, 1.0, seed=0)
    return lambda: simulator.simulate(graph, policy, drawn)


def heap_work(num_entries: int) -> Callable[[], object]:
    """Returns the pushes and pops of `num_entries` random times, ready to run."""
    draw = random.Random(0)
    times = [draw.random() for _ in range(num_entries)]

    def run() -> None:
        heap: list[tuple[float, int]] = []
        for entry in zip(times, range(num_entries), strict=True):
            heapq.heappush(heap, entry)
        while heap:
            heapq.heappop(heap)

    return run


def timings(works: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Returns the seconds of each work in each repeat, all taking turns, once warm."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for repeat in range(_REPEATS + 1):
        for name, work in works.items():
            began_s = time.perf_counter()
            work()
            if repeat:
                seconds[name].append(time.perf_counter() - began_s)
    return seconds


def median_ratio(over: list[float], under: list[float]) -> float:
    """Returns the median of the ratios of each repeat: passing load hits both alike."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def measure(hint: str) -> dict[str, float]:
    """Measures, prints, and returns the two figures of a hint."""
    policy = Policy(hint)
    kinds = 3 if policy.is_split else 2
    num_tasks = {m: kinds * _NUM_RANKS * m for m in (64, 256, 1024)}
    num_transfers = 2 * (_NUM_RANKS - 1) * 256
    simulated, both, alone = (
        f"simulation, {hint}",
        "heap of tasks and transfers",
        "heap of tasks",
    )
    found = timings(
        {
            simulated: simulation(256, policy),
            both: heap_work(num_tasks[256] + num_transfers),
            alone: heap_work(num_tasks[256]),
        }
    )
    sizes = timings({f"{m} microbatches": simulation(m, policy) for m in (64, 1024)})
    for name, each in found.items():
        ratio = median_ratio(found[simulated], each)
        middle_ms = statistics.median(each) * 1e3
        print(f"{name:28} {middle_ms:9.1f} ms   simulation / this = {ratio:.2f}")
    for m, (name, each) in zip((64, 1024), sizes.items(), strict=True):
        each_us = statistics.median(each) / num_tasks[m] * 1e6
        print(f"{name:28} {each_us:9.2f} us a task")
    growth = median_ratio(sizes["1024 microbatches"], sizes["64 microbatches"])
    return {
        "ratio_to_heapq": median_ratio(found[simulated], found[both]),
        "growth_64_to_1024": growth / (1024 / 64),
    }


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    target = parser.parse_args().json
    figures = {hint: measure(hint) for hint in ("bf", "bfw")}
    for hint, found in figures.items():
        for name, value in found.items():
            verdict = "ok" if value <= _BARS[name] else "ABOVE"
            what = f"{hint}: {name}"
            print(f"{what:28} {value:9.2f}      bar {_BARS[name]:g}: {verdict}")
    if target is not None:
        target.write_text(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
