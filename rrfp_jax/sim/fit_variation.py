"""What varies in a traced run: what a microbatch brings to several stages, and chance.

Predictions do not need these figures, see `sim.fit`; they say where the time varies.
Of each stage: all its tasks of a microbatch over their mean. Stages whose ratios are
correlated by at least a half, and by more than chance (three standard errors of no
correlation), directly or through others, share a load. Its variance is the mean
covariance of their pairs, in which the chance of single stages cancels.
"""

import dataclasses
import math
import statistics

from rrfp_jax.sim.fit import Fit

_STRONG = 0.5  # a correlation
_STANDARD_ERRORS = 3.0


@dataclasses.dataclass(frozen=True)
class Load:
    """What microbatches bring to several stages at once.

    Attributes:
      stages: that feel it.
      cv: standard deviation over mean of what is common.
    """

    stages: tuple[int, ...]
    cv: float


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """A stage over all traced microbatches that visit it.

    Attributes:
      mean_s: seconds of all its tasks of a microbatch.
      cv: how that varies from microbatch to microbatch.
      own_cv: what is left of it without the load that it shares.
    """

    mean_s: float
    cv: float
    own_cv: float


def variation(fitted: Fit) -> tuple[list[StageTimes], list[Load]]:
    """Returns each stage's times, and the loads that stages share."""
    ratios: list[dict[int, float]] = []
    means_s: list[float] = []
    for stage in range(fitted.graph.num_stages):
        taken = {
            at: sum(s for (_, of), s in each.compute.items() if of == stage)
            for at, each in enumerate(fitted.pool)
            if stage not in each.skipped
        }
        mean_s = statistics.fmean(taken.values()) if taken else 0.0
        means_s.append(mean_s)
        ratios.append({at: s / mean_s for at, s in taken.items()} if mean_s else {})
    loads = _loads(ratios)
    shared = {s: load.cv for load in loads for s in load.stages}
    stages = []
    for s, (mean_s, ratio) in enumerate(zip(means_s, ratios, strict=True)):
        cv = statistics.pstdev(ratio.values()) if ratio else 0.0
        own = math.sqrt(max(0.0, cv**2 - shared.get(s, 0.0) ** 2))
        stages.append(StageTimes(mean_s, cv, own))
    return stages, loads


def _loads(ratios: list[dict[int, float]]) -> list[Load]:
    covariances: dict[tuple[int, int], float] = {}
    group_of = list(range(len(ratios)))
    for b in range(len(ratios)):
        for a in range(b):
            both = sorted(ratios[a].keys() & ratios[b].keys())
            covariances[a, b], correlation = _together(
                [ratios[a][at] for at in both], [ratios[b][at] for at in both]
            )
            by_chance = _STANDARD_ERRORS / math.sqrt(max(1, len(both)))
            if correlation >= max(_STRONG, by_chance):
                old, new = group_of[b], group_of[a]
                group_of = [new if g == old else g for g in group_of]
    loads = []
    for group in dict.fromkeys(group_of):
        stages = tuple(s for s, g in enumerate(group_of) if g == group)
        pairs = [c for (a, b), c in covariances.items() if {a, b} <= set(stages)]
        if pairs:
            loads.append(Load(stages, math.sqrt(max(0.0, statistics.fmean(pairs)))))
    return loads


def _together(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """Returns covariance and correlation; zeros where there is none."""
    if len(xs) < 2:
        return 0.0, 0.0
    covariance = statistics.covariance(xs, ys)
    scale = statistics.stdev(xs) * statistics.stdev(ys)
    return covariance, covariance / scale if scale > 0 else 0.0
