"""Random pipelines, policies and delays for property tests."""

import dataclasses
import random

from hypothesis import strategies as st

from rrfp_jax.core import (
    arbiters,
    back_pressure,
    graph,
    hints,
    memory,
    orders,
    policies,
)
from rrfp_jax.core.back_pressure import (
    BackPressure,
    InFlight,
    OneByOne,
    QueuedWeights,
    RankProgress,
)
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.sim import costs
from rrfp_jax.sim.costs import CostTable
from tests.core import instrument

ADMITS = {"reserving": instrument.reserving, "one_by_one": instrument.one_by_one}


@st.composite
def graphs(draw: st.DrawFn, max_stages: int = 6, max_microbatches: int = 6):
    """Draws DAGs with towers and skip edges, any placement, skips and frozen stages."""
    num_stages = draw(st.integers(1, max_stages))
    num_microbatches = draw(st.integers(1, max_microbatches))
    edges = []
    for s in range(num_stages - 1):
        later = st.integers(s + 1, num_stages - 1)
        targets = draw(st.sets(later, min_size=1, max_size=2))
        edges += [(s, v) for v in sorted(targets)]
    ranks = draw(st.lists(st.integers(0, 3), min_size=num_stages, max_size=num_stages))
    names = sorted(set(ranks))
    skipped = set()
    for j in range(num_microbatches):
        wanted = draw(st.sets(st.integers(0, num_stages - 1), max_size=2))
        gone = wanted - {num_stages - 1}
        for s in reversed(range(num_stages - 1)):
            if all(v in gone for u, v in edges if u == s):
                gone.add(s)  # nobody reads it
        skipped |= {(s, j) for s in gone}
    return PipelineGraph(
        num_stages,
        num_microbatches,
        tuple(edges),
        tuple(names.index(r) for r in ranks),
        frozenset(skipped),
        frozenset(draw(st.sets(st.integers(0, num_stages - 1), max_size=3))),
        *draw(st.sampled_from([(False, False), (True, False), (True, True)])),
    )


def random_costs(of: PipelineGraph, seed: int) -> CostTable:
    """Returns small durations with many ties, zeros included."""
    draw = random.Random(seed)
    table = costs.constant(of, 0.0, 0.0)

    def each(choices: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(draw.choice(choices) for _ in range(of.num_microbatches))

    return CostTable(
        {key: each((0.0, 1.0, 1.0, 2.0, 7.5)) for key in sorted(table.compute)},
        {key: each((0.0, 0.0, 0.5, 3.0, 40.0)) for key in sorted(table.transfer)},
    )


@dataclasses.dataclass(frozen=True)
class Case:
    """One step, fully determined."""

    graph: PipelineGraph
    hint: str  # one of policies.RULES, "gpipe" or "shuffled"
    pressure: str
    limit: int
    launch_ahead: int
    seed: int
    weight_limit: int = 0  # none
    spare: float | None = None  # limit in bytes over the smallest; None: no limit

    def costs(self) -> CostTable:
        """Returns the durations of the step."""
        return random_costs(self.graph, self.seed)

    def memory(self) -> instrument.Bytes | None:
        """Returns random residuals, and the limit."""
        if self.spare is None:
            return None
        draw = random.Random(f"{self.seed}/bytes")
        count = range(self.graph.num_microbatches)
        routes = [self.graph.route(j) for j in count]
        num_bytes = {}
        for s in range(self.graph.num_stages):
            num_bytes[Kind.F, s] = tuple(
                draw.choice((1, 2, 5, 9)) * r.has_backward[s] for r in routes
            )
            num_bytes[Kind.B, s] = tuple(
                draw.choice((0, 1, 2, 5, 12)) * r.has_weight[s] for r in routes
            )
        residuals = memory.Residuals(num_bytes)
        smallest, _ = memory.smallest_limit(self.graph, residuals)
        return instrument.Bytes(residuals, int(smallest * self.spare))

    def dispatchers(self) -> list[Dispatcher]:
        """Returns fresh dispatchers."""
        return [
            Dispatcher(self.graph, rank, self._arbiter(rank), self.launch_ahead)
            for rank in range(self.graph.num_ranks)
        ]

    def watched(self) -> list[instrument.Watched]:
        """Returns fresh dispatchers under the instrument."""
        admits = ADMITS[self.pressure]
        return [
            instrument.Watched(
                d,
                self.graph,
                self.limit,
                admits,
                self.launch_ahead,
                self.weight_limit,
                self.memory(),
            )
            for d in self.dispatchers()
        ]

    def _arbiter(self, rank: int) -> arbiters.Arbiter:
        progress = RankProgress(self.graph, rank)
        rules: list[back_pressure.Rule] = []
        if self.pressure == "reserving":
            rules.append(InFlight(progress, self.limit))
        else:
            rules.append(OneByOne(progress, self.limit, self.graph, rank))
        if self.weight_limit:
            rules.append(QueuedWeights(progress, self.weight_limit, self.graph))
        if found := self.memory():
            rules.append(
                memory.ResidualBytes(
                    progress, found.limit, self.graph, rank, found.residuals
                )
            )
        return arbiters.ReadinessFirst(
            self.graph.stages_of[rank], self._hint(rank), BackPressure(progress, rules)
        )

    def _hint(self, rank: int) -> hints.Hint:
        if self.hint in policies.RULES:
            return policies.hints_for(self.graph, policies.Policy(self.hint))[rank]
        if self.hint == "gpipe":
            return hints.Ordered(orders.gpipe(self.graph)[rank])
        shuffled = self.graph.tasks(rank)
        random.Random(f"{self.seed}/{rank}").shuffle(shuffled)
        return hints.Ordered(shuffled)


def cases(
    of: st.SearchStrategy[PipelineGraph] | None = None,
) -> st.SearchStrategy[Case]:
    """Draws steps of readiness-first ranks."""
    return st.builds(
        Case,
        graph=graphs() if of is None else of,
        hint=st.sampled_from((*policies.RULES, "gpipe", "shuffled", "shuffled")),
        pressure=st.sampled_from(policies.PRESSURES),
        limit=st.integers(1, 4),
        launch_ahead=st.integers(1, 3),
        seed=st.integers(0, 10**6),
        weight_limit=st.integers(0, 3),
        spare=st.sampled_from([None, 1.0, 1.3, 2.0, 4.0]),
    )


def chains() -> st.SearchStrategy[PipelineGraph]:
    """Draws plain chains, one stage a rank."""
    return st.builds(
        lambda p, m: graph.chain(m, tuple(range(p))),
        st.integers(1, 5),
        st.integers(1, 6),
    )
