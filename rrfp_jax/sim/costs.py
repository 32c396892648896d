"""How long each task and each transfer takes: tables, and seeded ways to disturb them.

A `CostTable` holds a number for every task and transfer of a step. It is drawn before
the step begins, in a fixed order, so a duration depends on the seed and on the task but
never on when the task runs: two policies with one seed face the same delays. The
simulator and the runtime's emulated devices read the same object.
"""

import csv
import dataclasses
import io
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ConfigError

Seconds = tuple[float, ...]  # by microbatch
_Key = TypeVar("_Key", tuple[Kind, int], tuple[Kind, int, int])


@dataclasses.dataclass(frozen=True)
class CostTable:
    """Durations in seconds.

    Attributes:
      compute: (kind, stage) -> seconds by microbatch. W is apart from B, whether the
        backward is split or not; see `applied_to`.
      transfer: (kind, source stage, target stage) -> seconds by microbatch, for F along
        an edge and for B against it.
    """

    compute: Mapping[tuple[Kind, int], Seconds]
    transfer: Mapping[tuple[Kind, int, int], Seconds]

    def compute_s(self, task: Task) -> float:
        """Returns how long `task` occupies its rank."""
        return self.compute[task.kind, task.stage][task.microbatch]

    def transfer_s(self, source: Task, to: int) -> float:
        """Returns how long the output of `source` occupies the link to stage `to`."""
        return self.transfer[source.kind, source.stage, to][source.microbatch]


def constant(
    graph: PipelineGraph,
    forward_s: float | Sequence[float],
    backward_s: float | Sequence[float],
    transfer_s: float = 0.0,
    weight_s: float | Sequence[float] = 0.0,
) -> CostTable:
    """Returns a table in which all microbatches cost the same.

    Args:
      graph: whose tasks to price.
      forward_s: seconds of F, for all stages or for each.
      backward_s: seconds of B, likewise.
      transfer_s: seconds of each transfer between ranks.
      weight_s: seconds of W, likewise; where the backward is not split, they come on
        top of B.

    Raises:
      ConfigError: a sequence does not have one entry a stage.
    """
    compute = {}
    kinds = ((Kind.F, forward_s), (Kind.B, backward_s), (Kind.W, weight_s))
    for kind, given in kinds:
        each = given if isinstance(given, Sequence) else [given] * graph.num_stages
        if len(each) != graph.num_stages:
            raise ConfigError(
                f"{len(each)} durations of {kind} for {graph.num_stages} stages.\n"
                "  Give one number, or one for each stage."
            )
        for stage, seconds in enumerate(each):
            compute[kind, stage] = (seconds,) * graph.num_microbatches
    transfer = {}
    for u, v in graph.edges:
        if graph.placement[u] != graph.placement[v]:
            transfer[Kind.F, u, v] = (transfer_s,) * graph.num_microbatches
            transfer[Kind.B, v, u] = (transfer_s,) * graph.num_microbatches
    return CostTable(compute, transfer)


def applied_to(costs: CostTable, graph: PipelineGraph) -> CostTable:
    """Returns what the tasks of a graph take: where the backward is not split, its B
    takes as long as B and W.

    So two policies of which one splits the backward face the same delays.
    """
    if graph.is_split:
        return costs
    compute = dict(costs.compute)
    for (kind, s), each in costs.compute.items():
        if kind is Kind.W and s not in graph.frozen:
            both = zip(costs.compute[Kind.B, s], each, strict=True)
            compute[Kind.B, s] = tuple(b + w for b, w in both)
    return dataclasses.replace(costs, compute=compute)


def from_csv(text: str, graph: PipelineGraph, source: str) -> CostTable:
    """Reads a table with the columns kind, stage, to, microbatch, seconds.

    `to` is empty for a task and names the receiving stage for a transfer. `microbatch`
    may be `*` for all; later lines override earlier ones. Transfers not listed take no
    time.

    Raises:
      ConfigError: a line cannot be read, or a task has no duration.
    """
    unknown = math.nan if graph.is_split else 0.0
    free = constant(graph, math.nan, math.nan, weight_s=unknown)
    compute = {key: list(each) for key, each in free.compute.items()}
    transfer = {key: list(each) for key, each in free.transfer.items()}
    reader = csv.DictReader(io.StringIO(text))
    for row in reader:
        try:
            kind, stage = Kind(row["kind"]), int(row["stage"])
            to = row["to"]
            each = transfer[kind, stage, int(to)] if to else compute[kind, stage]
            which = row["microbatch"]
            every = range(len(each))
            for j in every if which == "*" else (every.index(int(which)),):
                each[j] = _seconds(row["seconds"])
        except (KeyError, ValueError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{source}, line {reader.line_num}: {dict(row)} is no duration of "
                f"this pipeline ({error}).\n  Columns: kind (F, B, W), stage, "
                "to (empty for a task), microbatch (or *), seconds."
            ) from error
    for task in graph.tasks():
        if math.isnan(compute[task.kind, task.stage][task.microbatch]):
            raise ConfigError(f"{source} gives no duration for {task}.\n  Add a line.")
    return CostTable(_frozen(compute), _frozen(transfer))


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{text} is no duration")
    return seconds


def _frozen(table: Mapping[_Key, Sequence[float]]) -> dict[_Key, Seconds]:
    return {key: tuple(each) for key, each in table.items()}


@dataclasses.dataclass(frozen=True)
class InjectedJitter:
    """With `probability`, a task is followed by a sleep (RRFP §7.6).

    The sleep is alpha * max(base_s, e) * (0.5 + r), r ~ U(0, 1), where e is the moving
    average 0.9 e + 0.1 c of the stage's compute times c of that kind. Here the average
    runs in microbatch order, so that it does not depend on the schedule. What takes no
    time is no task, and gets no sleep.
    """

    probability: float
    base_s: float
    alpha: float


LEVELS = {
    "J0": InjectedJitter(0.0, 0.0, 0.0),
    "J1": InjectedJitter(0.1, 0.005, 0.5),
    "J2": InjectedJitter(0.2, 0.010, 1.0),
    "J3": InjectedJitter(0.3, 0.015, 1.5),
}


def with_injected(costs: CostTable, jitter: InjectedJitter, seed: int) -> CostTable:
    """Returns `costs` with sleeps after some tasks."""
    draw = random.Random(f"{seed}/injected")
    compute = {}
    for key in sorted(costs.compute):
        average = costs.compute[key][0]
        each = []
        for seconds in costs.compute[key]:
            average = 0.9 * average + 0.1 * seconds
            chance, r = draw.random(), draw.random()
            sleep = jitter.alpha * max(jitter.base_s, average) * (0.5 + r)
            is_hit = chance < jitter.probability and seconds > 0
            each.append(seconds + sleep * is_hit)
        compute[key] = tuple(each)
    return dataclasses.replace(costs, compute=compute)


def with_lognormal(costs: CostTable, cv: float, seed: int) -> CostTable:
    """Returns `costs` with each task times a lognormal of mean 1.

    Args:
      costs: the table to disturb.
      cv: coefficient of variation, standard deviation over mean.
      seed: of the draws.
    """
    factor = _lognormal(cv, random.Random(f"{seed}/compute"))
    return dataclasses.replace(costs, compute=_scaled(costs.compute, factor))


def with_lognormal_transfers(costs: CostTable, cv: float, seed: int) -> CostTable:
    """Returns `costs` with each transfer times a lognormal of mean 1."""
    factor = _lognormal(cv, random.Random(f"{seed}/transfer"))
    return dataclasses.replace(costs, transfer=_scaled(costs.transfer, factor))


def with_heavy_tailed_transfers(costs: CostTable, tail: float, seed: int) -> CostTable:
    """Returns `costs` with each transfer times a Pareto variable of median 1.

    Args:
      costs: the table to disturb.
      tail: the Pareto exponent; the smaller, the heavier. RRFP §2 measured
        (p95 - p5) / p50 up to 58.7 for communication, which is an exponent of 0.57.
      seed: of the draws.
    """
    draw = random.Random(f"{seed}/tail")
    median = 2 ** (1 / tail)

    def factor() -> float:
        return draw.paretovariate(tail) / median

    return dataclasses.replace(costs, transfer=_scaled(costs.transfer, factor))


def with_straggler(
    costs: CostTable, graph: PipelineGraph, rank: int, factor: float
) -> CostTable:
    """Returns `costs` with every task of `rank` times `factor`.

    Raises:
      ConfigError: there is no such rank.
    """
    if rank not in graph.placement:
        raise ConfigError(
            f"straggler rank {rank} is none of the {graph.num_ranks} ranks.\n"
            f"  Name a rank from 0 to {graph.num_ranks - 1}."
        )
    compute = {
        (kind, stage): tuple(
            s * factor if graph.placement[stage] == rank else s for s in each
        )
        for (kind, stage), each in costs.compute.items()
    }
    return dataclasses.replace(costs, compute=compute)


def with_image_load(
    costs: CostTable, stages: Collection[int], cv: float, seed: int
) -> CostTable:
    """Returns `costs` with a factor per microbatch, shared by all tasks of `stages`.

    A microbatch with many images is slow in the whole vision tower, forward and back.
    The factor is lognormal with mean 1.
    """
    count = max((len(each) for each in costs.compute.values()), default=0)
    loads = image_loads(count, cv, seed)
    compute = {
        (kind, stage): loaded(each, loads) if stage in stages else each
        for (kind, stage), each in costs.compute.items()
    }
    return dataclasses.replace(costs, compute=compute)


def image_loads(count: int, cv: float, seed: int) -> list[float]:
    """Returns the images of each microbatch over their mean: lognormal of mean 1."""
    factor = _lognormal(cv, random.Random(f"{seed}/images"))
    return [factor() for _ in range(count)]


def loaded(each: Seconds, loads: Sequence[float]) -> Seconds:
    """Returns the seconds of each microbatch times its load."""
    return tuple(s * load for s, load in zip(each, loads, strict=True))


def scaled(costs: CostTable, factor: float) -> CostTable:
    """Returns `costs` with every task and every transfer times `factor`."""
    return CostTable(
        _scaled(costs.compute, lambda: factor), _scaled(costs.transfer, lambda: factor)
    )


def _lognormal(cv: float, draw: random.Random) -> Callable[[], float]:
    sigma = math.sqrt(math.log1p(cv * cv))
    return lambda: draw.lognormvariate(-sigma * sigma / 2, sigma)


def _scaled(
    table: Mapping[_Key, Seconds], factor: Callable[[], float]
) -> dict[_Key, Seconds]:
    return {key: tuple(s * factor() for s in table[key]) for key in sorted(table)}
