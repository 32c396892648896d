"""Steps that a run could have had: drawn from its traced microbatches.

The bootstrap is balanced (Davison, Hinkley and Schechtman, Biometrika 73, 1986): all
draws together hold each traced microbatch equally often, to within one. So the mean
over few draws has the traced mean of every duration, and what is left of chance is
which microbatches meet in a step.
"""

import dataclasses
import random
from collections.abc import Sequence

from rrfp_jax.core import memory
from rrfp_jax.core.graph import Edge, PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import fit_host
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim.fit import Fit, Link, Microbatch
from rrfp_jax.sim.fit_cut import Cut

# How far the assumed part of W in an unsplit backward may be off, either way.
_FRACTION_DOUBT = 0.1


@dataclasses.dataclass(frozen=True)
class Settings:
    """How steps are drawn.

    Attributes:
      num_draws: steps.
      seed: of the choice of microbatches.
      weight_fraction: of an unsplit traced backward that W would take. It is a guess:
        each draw takes another, uniformly up to 0.1 off.
    """

    num_draws: int = 20
    seed: int = 0
    weight_fraction: float = 0.5


class Draw:
    """One step, on any cut.

    Args:
      fitted: the traced run.
      chosen: the step's microbatches, from `fitted.pool`; an attribute too.
      weight_fraction: of an unsplit traced backward that W takes.
    """

    def __init__(
        self, fitted: Fit, chosen: Sequence[Microbatch], weight_fraction: float
    ) -> None:
        self._fitted = fitted
        self.chosen = chosen
        self._fraction = weight_fraction
        self._means = fitted.mean_transfers()
        self._made: dict[Cut, tuple[PipelineGraph, CostTable]] = {}

    def run(self, cut: Cut, policy: Policy) -> Trace:
        """Simulates the step, with the host's latency.

        Raises:
          ConfigError: the policy does not fit the cut, or its limit the residuals.
        """
        if cut not in self._made:
            skips = [each.skipped for each in self.chosen]
            graph = cut.graph(self._fitted.graph, skips)
            self._made[cut] = graph, self._costs(cut)
        plain, costs = self._made[cut]
        graph = policy.applied_to(plain)
        residuals = self._residuals(cut, graph)
        latency_s = self._fitted.latency_s
        return fit_host.simulate(graph, policy, costs, latency_s, residuals)

    def _costs(self, cut: Cut) -> CostTable:
        compute = {
            (kind, s): tuple(
                sum(share * self._task_s(each, kind, old) for old, share in parts)
                for each in self.chosen
            )
            for kind in Kind
            for s, parts in enumerate(cut.parts)
        }
        transfer: dict[Link, tuple[float, ...]] = {}
        for (u, v), alike in zip(cut.edges, cut.alike, strict=True):
            if cut.placement[u] != cut.placement[v]:
                transfer[Kind.F, u, v] = self._transfers_s(Kind.F, alike)
                transfer[Kind.B, v, u] = self._transfers_s(Kind.B, alike)
        return CostTable(compute, transfer)

    def _task_s(self, each: Microbatch, kind: Kind, stage: int) -> float:
        """Returns seconds of a traced stage, W apart from B; 0 for no such task."""
        graph = self._fitted.graph
        if graph.is_split or kind is Kind.F or stage in graph.frozen:
            return each.compute.get((kind, stage), 0.0)
        part = self._fraction if kind is Kind.W else 1 - self._fraction
        return part * each.compute.get((Kind.B, stage), 0.0)

    def _transfers_s(self, kind: Kind, alike: Edge | None) -> tuple[float, ...]:
        if alike is None:
            return (0.0,) * len(self.chosen)
        u, v = alike
        link = (Kind.F, u, v) if kind is Kind.F else (Kind.B, v, u)
        if link not in self._means:  # frozen there: nothing ever went this way
            link = (Kind.F, u, v)
        mean_s = self._means.get(link, 0.0)
        return tuple(each.transfer.get(link, mean_s) for each in self.chosen)

    def _residuals(self, cut: Cut, graph: PipelineGraph) -> Residuals | None:
        """Returns what tasks keep, None if that is not known.

        What a W would need of an unsplit backward is not known either: all that F kept.
        """
        if not self._fitted.knows_residuals:
            return None
        was_split = self._fitted.graph.is_split

        def of(j: int, s: int) -> tuple[int, int]:
            kept = self.chosen[j].kept
            forward = later = 0.0
            for old, share in cut.parts[s]:
                forward += share * kept[Kind.F, old]
                later += share * kept[Kind.B if was_split else Kind.F, old]
            has_weight = graph.route(j).has_weight[s]
            return round(forward), round(later) if has_weight else 0

        return memory.tabulate(graph, of)


def draws(fitted: Fit, settings: Settings) -> list[Draw]:
    """Returns the steps on which all policies are compared."""
    random_ = random.Random(f"{settings.seed}/microbatches")
    size = fitted.graph.num_microbatches
    times, rest = divmod(settings.num_draws * size, len(fitted.pool))
    chosen = [*fitted.pool * times, *random_.sample(fitted.pool, rest)]
    random_.shuffle(chosen)
    doubt = 0.0 if fitted.graph.is_split else _FRACTION_DOUBT
    found = []
    for i in range(settings.num_draws):
        fraction = settings.weight_fraction + doubt * random_.uniform(-1, 1)
        fraction = min(1.0, max(0.0, fraction))
        found.append(Draw(fitted, chosen[i * size : (i + 1) * size], fraction))
    return found
