"""What is measured: workloads, ranks and jitter, as tables of seconds."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

from rrfp_jax import workload_files
from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs, report
from rrfp_jax.workloads.stage_times import Workload
from scripts.peers.registry import ROOT
from third_party import peer_job
from third_party.peer_job import Iteration, Job

WIDTH, ROWS = 128, 32  # payloads of 16 KiB; the programs take microseconds
KINDS, RANKS, LEVELS = ("language", "multimodal"), (4, 8), ("J1", "J3")
_PATIENCE = 4.0  # times the tasks' seconds on the busiest rank
_START_S = 120.0


@dataclasses.dataclass(frozen=True)
class Setting:
    """A workload on so many ranks under so much jitter (RRFP §7.6)."""

    kind: str
    num_ranks: int
    level: str

    def __str__(self) -> str:
        return f"{self.kind} P={self.num_ranks} {self.level}"

    @property
    def workload(self) -> Workload:
        """What it stands for, scaled to milliseconds, under its jitter."""
        path = ROOT / f"configs/bench/emulated_{self.kind}.py"
        _, workload = workload_files.emulated(path, self.num_ranks)
        return dataclasses.replace(workload, level=self.level)

    @property
    def link_bytes_per_s(self) -> float:
        """The rate of links on which payloads take what the workload's take."""
        workload = self.workload
        transfer_s = workload.times(self.num_ranks).transfer_s[:-1]
        return WIDTH * ROWS * 4 / (workload.scale * statistics.fmean(transfer_s))


def on(ranks: Sequence[int]) -> tuple[Setting, ...]:
    """Returns the settings of pipelines of so many ranks each.

    Raises:
      ConfigError: a pipeline of one rank would pass nothing on.
    """
    if too_few := [p for p in ranks if p < 2]:
        raise ConfigError(f"--ranks names {too_few[0]}.\n  Name numbers from 2 on.")
    return tuple(Setting(k, p, j) for k in KINDS for p in ranks for j in LEVELS)


ALL = on(RANKS)
QUICK = (Setting("multimodal", 4, "J3"),)


def draw(setting: Setting, num_microbatches: int, seed: int) -> Iteration:
    """Returns a step: its draws depend on the setting and the seed alone."""
    graph = graphs.chain(num_microbatches, placement.one_each(setting.num_ranks))
    drawn = setting.workload.draw(graph, seed)
    seconds: dict[str, list[Sequence[float]]] = {kind: [] for kind in peer_job.KINDS}
    for (kind, _), each in sorted(drawn.compute.items()):
        seconds[str(kind)].append(each)
    return Iteration(str(setting), seed, seconds)


def job(
    settings: Sequence[Setting], num_microbatches: int, seeds: Iterable[int]
) -> Job:
    """Returns a job without schedules.

    Args:
      settings: all with the same number of ranks.
      num_microbatches: of a step.
      seeds: of each setting.
    """
    (num_ranks,) = {each.num_ranks for each in settings}
    iterations = [
        draw(each, num_microbatches, seed) for seed in seeds for each in settings
    ]
    busy_s = sum(busiest_s(each.seconds) for each in iterations)
    return Job(
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        width=WIDTH,
        rows=ROWS,
        seed=0,
        limit_s=_START_S + _PATIENCE * busy_s,
        schedules=(),
        iterations=iterations,
    )


def busiest_s(seconds: peer_job.Seconds) -> float:
    """Returns the work of the rank that has most: no schedule takes less."""
    stages = zip(*(seconds[kind] for kind in peer_job.KINDS), strict=True)
    return max(sum(map(sum, stage)) for stage in stages)


def bound_s(seconds: peer_job.Seconds) -> float:
    """Returns what no order of one stage a rank can beat, if transfers are free."""
    num_ranks, count = len(seconds["F"]), len(seconds["F"][0])
    chain = graphs.chain(count, placement.one_each(num_ranks))
    graph = dataclasses.replace(chain, is_split=True)
    compute = {
        (Kind(kind), s): tuple(each)
        for kind, stages in seconds.items()
        for s, each in enumerate(stages)
    }
    free = costs.constant(graph, 0.0, 0.0).transfer
    return report.lower_bound_s(graph, costs.CostTable(compute, free))
