"""Other cuts and placements of a traced pipeline, as far as its trace knows them.

* Two stages a rank: V-shaped and interleaved share a cut, so either tells the other
  exactly.
* From one stage a rank to two, each stage is cut in half: each half takes and keeps
  half of what the stage did, in every microbatch. A stage of several layers can be cut
  so, but for what its first or last layer has alone (an embedding, a head).
* From two to one, neighbours of a chain are put together, if what one microbatch visits
  or trains of them, all do.

Transfers that the traced placement did not have (inside a cut stage, or at the turn of
a V) take what those of the nearest edge took.
"""

import dataclasses
from collections.abc import Sequence

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import placement as placements
from rrfp_jax.core.graph import Edge, PipelineGraph
from rrfp_jax.core.placement import Placement
from rrfp_jax.sim.fit import Fit, observed_edges

Part = tuple[int, float]  # a traced stage, and the share of it

ONE_EACH, V_SHAPED, INTERLEAVED = "one_each", "v_shaped", "interleaved"


@dataclasses.dataclass(frozen=True)
class Cut:
    """A pipeline made of the traced stages.

    Attributes:
      name: of the placement, as `--config.pipeline.placement` has it; empty where it is
        none of the usual ones.
      placement: stage -> rank.
      edges: of the new stages.
      parts: by new stage, what it is made of.
      alike: by new edge, the traced edge whose transfers it has; None if none had any.
      note: what is assumed; empty where the cut is the traced one.
    """

    name: str
    placement: Placement
    edges: tuple[Edge, ...]
    parts: tuple[tuple[Part, ...], ...]
    alike: tuple[Edge | None, ...]
    note: str = ""

    @property
    def num_chunks(self) -> int:
        """The most stages of a rank."""
        return max(self.placement.count(rank) for rank in set(self.placement))

    def graph(
        self, traced: PipelineGraph, skips: Sequence[frozenset[int]]
    ) -> PipelineGraph:
        """Returns a step.

        Args:
          traced: the graph that this was cut from.
          skips: by microbatch, the traced stages that it does not visit.
        """
        return PipelineGraph(
            len(self.placement),
            len(skips),
            self.edges,
            self.placement,
            skipped=frozenset(
                (s, j)
                for j, skipped in enumerate(skips)
                for s, parts in enumerate(self.parts)
                if parts[0][0] in skipped
            ),
            frozen=frozenset(
                s for s, parts in enumerate(self.parts) if parts[0][0] in traced.frozen
            ),
        )


def cuts(fitted: Fit) -> list[Cut]:
    """Returns the traced placement, then those that can be derived from it."""
    graph, seen = fitted.graph, observed_edges(fitted.mean_transfers())
    num_ranks, num_stages = graph.num_ranks, graph.num_stages
    traced = _named(graph.placement)
    whole = tuple(((s, 1.0),) for s in range(num_stages))
    alike = tuple(_nearest(edge, seen) for edge in graph.edges)
    found = [Cut(traced, graph.placement, graph.edges, whole, alike)]
    if num_ranks == 1:
        return found
    if traced == ONE_EACH:
        note = "each stage cut in half: half its time and half its residuals each"
        for name, placement in _of_two(num_ranks).items():
            found.append(_halved(graph, seen, name, placement, note))
    elif traced in _of_two(num_ranks) and num_stages == 2 * num_ranks:
        note = "the same stages on other ranks"
        for name, placement in _of_two(num_ranks).items():
            if name != traced:
                cut = dataclasses.replace(found[0], name=name, placement=placement)
                found.append(dataclasses.replace(cut, note=note))
        if _can_join(fitted):
            found.append(_joined(graph, seen))
    return found


def _of_two(num_ranks: int) -> dict[str, Placement]:
    """Returns the placements of two stages a rank."""
    return {
        V_SHAPED: placements.v_shaped(num_ranks),
        INTERLEAVED: placements.interleaved(num_ranks, 2),
    }


def _named(placement: Placement) -> str:
    num_ranks = max(placement) + 1
    if placement == placements.one_each(num_ranks):
        return ONE_EACH
    if placement == placements.v_shaped(num_ranks):
        return V_SHAPED
    chunks = len(placement) // num_ranks
    if placement == placements.interleaved(num_ranks, chunks):
        return INTERLEAVED
    return ""


def _halved(
    graph: PipelineGraph,
    seen: Sequence[Edge],
    name: str,
    placement: Placement,
    note: str,
) -> Cut:
    stages = range(graph.num_stages)
    edges = [(2 * s, 2 * s + 1) for s in stages]
    edges += [(2 * u + 1, 2 * v) for u, v in graph.edges]
    edges.sort()  # the halves of a chain are a chain, and some orders ask for one
    return Cut(
        name,
        placement,
        tuple(edges),
        tuple(((s // 2, 0.5),) for s in range(2 * graph.num_stages)),
        tuple(_nearest((u // 2, v // 2), seen) for u, v in edges),
        note,
    )


def _can_join(fitted: Fit) -> bool:
    graph = fitted.graph
    pairs = [(s, s + 1) for s in range(0, graph.num_stages, 2)]
    return sorted(graph.edges) == list(graphs.chain_edges(graph.num_stages)) and all(
        (a in each) == (b in each)
        for a, b in pairs
        for each in (graph.frozen, *(m.skipped for m in fitted.pool))
    )


def _joined(graph: PipelineGraph, seen: Sequence[Edge]) -> Cut:
    count = graph.num_stages // 2
    edges = graphs.chain_edges(count)
    return Cut(
        ONE_EACH,
        placements.one_each(count),
        edges,
        tuple(((2 * s, 1.0), (2 * s + 1, 1.0)) for s in range(count)),
        tuple(_nearest((2 * u + 1, 2 * v), seen) for u, v in edges),
        "neighbouring stages put together",
    )


def _nearest(edge: Edge, seen: Sequence[Edge]) -> Edge | None:
    """Returns the edge of `seen` whose ends are nearest, the first of such."""
    u, v = edge
    return min(seen, key=lambda e: abs(e[0] - u) + abs(e[1] - v), default=None)
