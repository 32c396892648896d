"""What the drivers of all peers share: a job, its model, its clock, and what they say.

README.md describes the two JSON files. This runs in each peer's own environment, so it
needs numpy and nothing of rrfp_jax.
"""

import collections
import contextlib
import dataclasses
import faulthandler
import itertools
import json
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

Seconds = Mapping[str, Sequence[Sequence[float]]]  # kind -> stage -> by microbatch
KINDS = ("F", "B", "W")
TOLERANCE = 1e-5  # of a gradient, over the largest entry of the reference
_EXACT_S = 1e-6  # of sums of times
DROPPED_SCALE = 0.1  # of the durations of the iteration that is dropped


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One step.

    Attributes:
      setting: what its durations stand for.
      seed: of the draw.
      seconds: how long each task occupies its rank; one stage a rank.
    """

    setting: str
    seed: int
    seconds: Seconds


@dataclasses.dataclass(frozen=True)
class Job:
    """What every process of a peer is told.

    Attributes:
      num_ranks: pipeline ranks.
      num_microbatches: of a step.
      width: of the layers; there are two a rank.
      rows: of a microbatch.
      seed: of weights and data.
      limit_s: what a schedule may take before its processes give up.
      schedules: to run one after the other.
      iterations: of each schedule, after the one that is dropped.
    """

    num_ranks: int
    num_microbatches: int
    width: int
    rows: int
    seed: int
    limit_s: float
    schedules: Sequence[str]
    iterations: Sequence[Iteration]

    def steps(self) -> Iterator[tuple[bool, Iteration]]:
        """Yields all steps of a schedule, and whether to drop them.

        The dropped one, in which programs compile and connections are made, is the
        first one at a tenth of its durations.
        """
        first = self.iterations[0]
        seconds = scaled(first.seconds, DROPPED_SCALE)
        yield True, dataclasses.replace(first, seconds=seconds)
        for iteration in self.iterations:
            yield False, iteration


def write(job: Job, path: pathlib.Path) -> None:
    """Writes a job as JSON."""
    path.write_text(json.dumps(dataclasses.asdict(job)))


def read(path: str) -> Job:
    """Reads what `write` wrote."""
    data = json.loads(pathlib.Path(path).read_text())
    iterations = [Iteration(**each) for each in data.pop("iterations")]
    return Job(**data, iterations=iterations)


def scaled(seconds: Seconds, factor: float) -> Seconds:
    """Returns all durations times `factor`."""
    return {
        kind: [[s * factor for s in each] for each in stages]
        for kind, stages in seconds.items()
    }


def loop(num_ranks: int) -> list[int]:
    """Returns the ranks of twice as many stages, in turn: 0, 1, 0, 1."""
    return [*range(num_ranks), *range(num_ranks)]


def v_shape(num_ranks: int) -> list[int]:
    """Returns the ranks of twice as many stages, down and up: 0, 1, 1, 0."""
    return [*range(num_ranks), *reversed(range(num_ranks))]


def placed(seconds: Seconds, ranks: Sequence[int]) -> Seconds:
    """Returns the durations of more stages than ranks, as a table by stage.

    A rank's time on a microbatch is shared evenly by the stages that it holds.

    Args:
      seconds: of one stage a rank.
      ranks: of each stage.
    """
    held = collections.Counter(ranks)
    return {
        kind: [[s / held[rank] for s in stages[rank]] for rank in ranks]
        for kind, stages in seconds.items()
    }


def weights(job: Job) -> list[np.ndarray]:
    """Returns the layers' weights, float32 [width, width]; a layer is tanh(h @ w)."""
    draw = np.random.default_rng(job.seed)
    shape = (2 * job.num_ranks, job.width, job.width)
    return list((draw.standard_normal(shape) / job.width**0.5).astype(np.float32))


def batch(job: Job) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of a step, float32 [microbatches * rows, width]."""
    draw = np.random.default_rng(job.seed + 1)
    shape = (2, job.num_microbatches * job.rows, job.width)
    x, target = draw.standard_normal(shape).astype(np.float32)
    return x, target


def reference(job: Job) -> list[np.ndarray]:
    """Returns the gradients of the mean squared error over the batch, in float64."""
    x, target = (each.astype(np.float64) for each in batch(job))
    layers = [w.astype(np.float64) for w in weights(job)]
    outputs = [x]
    for w in layers:
        outputs.append(np.tanh(outputs[-1] @ w))
    grad = 2 * (outputs[-1] - target) / target.size
    grads = []
    for w, h, y in zip(layers[::-1], outputs[-2::-1], outputs[:0:-1], strict=True):
        through = grad * (1 - y**2)
        grads.append(h.T @ through)
        grad = through @ w.T
    return grads[::-1]


def error(found: Mapping[int, Any], expected: Sequence[np.ndarray]) -> float:
    """Returns the largest difference of gradients, over the largest entry expected.

    Args:
      found: by layer, those that this process has.
      expected: of all layers.
    """
    return max(
        float(np.abs(np.asarray(grad) - expected[layer]).max())
        / float(np.abs(expected[layer]).max())
        for layer, grad in found.items()
    )


class Meter:
    """Makes the tasks of one step last as long as a table says, and counts them.

    Args:
      seconds: by stage of the schedule that runs.
      ranks: of each stage.
      is_split: whether B and W are tasks of their own; else B lasts as long as both.
    """

    def __init__(self, seconds: Seconds, ranks: Sequence[int], is_split: bool) -> None:
        self._seconds, self._ranks, self._is_split = seconds, ranks, is_split
        self._last = "W" if is_split else "B"
        self.tasks: list[tuple[str, int, int, float, float]] = []  # ..., begin, end

    def duration_s(self, kind: str, stage: int, microbatch: int) -> float:
        """Returns how long a task lasts."""
        kinds = "BW" if kind == "B" and not self._is_split else kind
        return sum(self._seconds[each][stage][microbatch] for each in kinds)

    @contextlib.contextmanager
    def task(self, kind: str, stage: int, microbatch: int) -> Iterator[None]:
        """Lasts until the task's time is over, counted from when it really begins."""
        begin_s = time.perf_counter()
        yield
        until_s = begin_s + self.duration_s(kind, stage, microbatch)
        time.sleep(max(0.0, until_s - time.perf_counter()))
        self.tasks.append((kind, stage, microbatch, begin_s, time.perf_counter()))

    def check(self, here: Sequence[int]) -> None:
        """Checks that each task of the ranks `here` was run once, and none beside
        another one of its rank: a device has one thing to do at a time.

        Raises:
          AssertionError: that is not so.
        """
        kinds = KINDS if self._is_split else KINDS[:2]
        stages = [s for s, rank in enumerate(self._ranks) if rank in here]
        count = len(self._seconds["F"][0])
        wanted = [(k, s, j) for k in kinds for s in stages for j in range(count)]
        found = sorted(task[:3] for task in self.tasks)
        assert found == sorted(wanted), f"{len(found)} tasks for {len(wanted)}"
        for rank in here:
            mine = [task for task in self.tasks if self._ranks[task[1]] == rank]
            mine.sort(key=lambda task: task[3:])
            for before, after in itertools.pairwise(mine):
                clear_s = after[3] - before[4]
                assert clear_s > -_EXACT_S, f"rank {rank}: {before} beside {after}"

    def peak_in_flight(self, rank: int) -> int:
        """Returns the most microbatches at once of which F has begun on a rank and the
        last backward has not ended.
        """
        begun: dict[int, float] = {}
        ended: dict[int, float] = {}
        for kind, stage, microbatch, begin_s, end_s in self.tasks:
            if self._ranks[stage] != rank:
                continue
            if kind == "F":
                begun[microbatch] = min(begin_s, begun.get(microbatch, begin_s))
            if kind == self._last:
                ended[microbatch] = max(end_s, ended.get(microbatch, end_s))
        moments = [(at_s, 1) for at_s in begun.values()]
        moments += [(at_s, -1) for at_s in ended.values()]
        live = peak = 0
        for _, change in sorted(moments):
            live += change
            peak = max(peak, live)
        return peak

    def seen(self, iteration: Iteration, begin_s: float, grad_error: float) -> Any:
        """Returns an entry of `Report` about the ranks of this process."""
        here = sorted({self._ranks[stage] for _, stage, *_ in self.tasks})
        self.check(here)
        return {
            "setting": iteration.setting,
            "seed": iteration.seed,
            "begin_s": begin_s,
            "end_s": max(task[4] for task in self.tasks),
            "peak_in_flight": {str(r): self.peak_in_flight(r) for r in here},
            "gradient_error": grad_error,
        }


class Report:
    """What a process says; written after every schedule, so none is lost.

    Args:
      path: of the file.
      peer: its name.
      version: of it.
      limit_s: what a schedule may take; then all threads are printed, and the end.
    """

    def __init__(self, path: str, peer: str, version: str, limit_s: float) -> None:
        self._path, self._limit_s = pathlib.Path(path), limit_s
        self._said: dict[str, Any] = {"peer": peer, "version": version}
        self._said["schedules"] = self._schedules = []

    @contextlib.contextmanager
    def schedule(self, name: str) -> Iterator[list[Any]]:
        """Yields the list of a schedule's iterations, to be filled."""
        faulthandler.dump_traceback_later(self._limit_s, exit=True)
        iterations: list[Any] = []
        yield iterations
        self._schedules.append({"schedule": name, "iterations": iterations})
        self._path.write_text(json.dumps(self._said))
        faulthandler.cancel_dump_traceback_later()
