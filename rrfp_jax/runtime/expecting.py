"""What each message of a step is to bring: known before it comes, from the programs."""

from collections.abc import Sequence

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.runtime.compiler import Plan
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.runtime.stage import is_inexact
from rrfp_jax.runtime.ties import Ties
from rrfp_jax.transport.base import Expected, Message, Name, Tied


class Expecting:
    """Says what a message brings: called by `Transport`.

    Args:
      graph: of the step.
      plans: its programs, by microbatch.
      ranks: the devices of each pipeline rank.
      tied: the tied parameters.
      sample_ids: of each microbatch; empty if they are not known.

    Raises (when called):
      KeyError: the step has no such message.
    """

    def __init__(
        self,
        graph: PipelineGraph,
        plans: Sequence[Plan],
        ranks: Sequence[RankMesh],
        tied: Ties,
        sample_ids: Sequence[tuple[int, ...]] = (),
    ) -> None:
        self._graph = graph
        self._plans = plans
        self._ranks = ranks
        self._tied = tied
        self._sample_ids = sample_ids

    def __call__(self, name: Name) -> Expected:
        """Returns what `name` brings."""
        if isinstance(name, Tied):
            return self._tied.expected(name)
        return self._expected(name)

    def _expected(self, message: Message) -> Expected:
        (kind, stage, j), to = message
        if not 0 <= j < self._graph.num_microbatches:
            raise KeyError(message)
        route = self._graph.route(j)
        if (kind, to) not in route.successors.get((kind, stage), ()):
            raise KeyError(message)
        # A cotangent is of the output of the stage that it goes to.
        programs = self._plans[j][stage if kind is Kind.F else to]
        assert programs is not None, message
        avals = [
            aval for aval in programs.output.avals if kind is Kind.F or is_inexact(aval)
        ]
        placement = self._graph.placement
        sender, receiver = self._ranks[placement[stage]], self._ranks[placement[to]]
        return Expected(
            avals,
            [sender.of_value(aval.shape) for aval in avals],
            [receiver.of_value(aval.shape) for aval in avals],
            sender.processes,
            receiver.processes,
            self._sample_ids[j] if self._sample_ids else (),
        )
