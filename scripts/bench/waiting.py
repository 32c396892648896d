"""How to learn of finishes: one polling thread against watcher threads.

    python scripts/bench/waiting.py [--json FILE]

4 ranks x 64 microbatches of tiny programs. `polling` is the runtime. `watchers` has a
thread for each rank and each direction, which blocks until the next launch of the rank
has finished, or the next payload for it has arrived, and then posts the event on a
queue that the launching thread waits on. All else is the same. In turn; medians.
"""

import argparse
import json
import pathlib
import queue
import statistics
import threading
import time
from typing import Any

import host_overhead
import jax
import toy

from rrfp_jax.core.events import Arrived, Finished
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Told, Trace
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.transport.base import Message
from rrfp_jax.transport.in_process import InProcess

NUM_REPEATS = 15


class WatchingDevices:
    """The runtime's `Devices`, with blocking threads instead of polls."""

    def __init__(self, graph: PipelineGraph, transport: InProcess) -> None:
        self.trace = Trace(graph)
        self._placement = graph.placement
        self._transport = transport
        self._events: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._num_pending = 0
        self._watched: dict[Any, queue.SimpleQueue[Any]] = {}
        for key in [(r, what) for r in range(graph.num_ranks) for what in "FA"]:
            self._watched[key] = queue.SimpleQueue()
            threading.Thread(target=self._watch, args=key, daemon=True).start()

    def _watch(self, rank: int, what: str) -> None:
        while (item := self._watched[rank, what].get()) is not None:
            event, arrays = item
            jax.block_until_ready(arrays)
            self._events.put(Told(time.perf_counter(), rank, event))

    def launched(self, task: Task, flag: Any) -> None:
        """Gives the flag to the rank's watcher."""
        self._num_pending += 1
        self._watched[self._placement[task.stage], "F"].put((Finished(task), flag))

    def sent(self, message: Message) -> None:
        """Gives the payload to the receiver's watcher."""
        self._num_pending += 1
        payload = self._transport._payloads[message]
        rank = self._placement[message.to]
        self._watched[rank, "A"].put((Arrived(*message), payload))

    def poll(self) -> list[Told]:
        """Waits for an event; takes all that are there."""
        told = [self._events.get()]
        while not self._events.empty():
            told.append(self._events.get())
        self._num_pending -= len(told)
        return told

    def close(self) -> None:
        """Ends the threads."""
        for watched in self._watched.values():
            watched.put(None)

    def pause(self) -> None:
        """Never asked: `poll` waits."""

    def is_idle(self) -> bool:
        """Whether nothing is running or in transit."""
        return not self._num_pending


class WatchingPipeline(Pipeline):
    """The pipeline on watcher threads."""

    def _devices(self, graph: PipelineGraph, transport: InProcess) -> Any:
        self._watching = WatchingDevices(graph, transport)
        return self._watching

    def run(self, *arguments: Any, **options: Any) -> Any:
        """Runs a step and ends its threads."""
        result = super().run(*arguments, **options)
        self._watching.close()
        return result


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    size = (host_overhead.NUM_RANKS, host_overhead.NUM_MICROBATCHES)
    polling, params, microbatches = toy.make_pipeline(*size)
    watchers, _, _ = toy.make_pipeline(*size, WatchingPipeline)
    plain_loop = host_overhead.PlainLoop(polling, params, microbatches)
    calls = {
        "plain loop": plain_loop,
        "polling": lambda: polling.run(params, microbatches),
        "watchers": lambda: watchers.run(params, microbatches),
    }
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(NUM_REPEATS + 2):
        for name, call in calls.items():
            elapsed_s = host_overhead.seconds(call)
            if repeat >= 2:  # the first two compile and warm up
                runs[name].append(elapsed_s)
    num_tasks = 2 * host_overhead.NUM_RANKS * host_overhead.NUM_MICROBATCHES
    figures = {}
    for name, times in runs.items():
        us_per_task = statistics.median(times) / num_tasks * 1e6
        figures[name.replace(" ", "_") + "_us_per_task"] = us_per_task
        print(f"{name:>12} {us_per_task:8.0f} us a task")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
