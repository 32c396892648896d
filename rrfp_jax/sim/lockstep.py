"""Virtual ranks of several devices that run each task together.

A task of such a rank has collectives among its members, so it begins when the last of
them has launched it and ends for all at once. A payload is cut alike at both ends: each
member sends its part on a link of its own, and has it at a time of its own.
"""

from collections.abc import Sequence

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Span, Trace, Transfer
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim.costs import CostTable, applied_to


class Lockstep:
    """Links that work beside the ranks; see `machine.Overlapped`.

    Args:
      graph: the tasks.
      costs: how long tasks take; of the slowest member.
      transfers: by member, how long its parts of payloads take. The tasks in these
        tables do not count.

    Attributes:
      trace: the spans begun, and the transfers, each until the last member has its
        part.

    Raises:
      ConfigError: a group of less than two members.
    """

    def __init__(
        self, graph: PipelineGraph, costs: CostTable, transfers: Sequence[CostTable]
    ) -> None:
        if len(transfers) < 2:
            raise ConfigError(
                f"a group of {len(transfers)} has nobody to agree with.\n"
                "  Give the transfers of two members or more, or use sim.simulator."
            )
        self.trace = Trace(graph)
        self._placement = graph.placement
        self._costs = applied_to(costs, graph)
        self._transfers = [each.transfer for each in transfers]
        self._rank_free_s = [0.0] * graph.num_ranks
        self._links_free_s: dict[tuple[int, int], list[float]] = {}

    def rank_of(self, stage: int) -> int:
        """Returns the rank that holds `stage`."""
        return self._placement[stage]

    def launch(self, task: Task, now_s: float) -> float:
        """Queues a task that all members have launched; returns when it ends."""
        rank = self._placement[task.stage]
        start_s = max(now_s, self._rank_free_s[rank])
        end_s = start_s + self._costs.compute_s(task)
        self._rank_free_s[rank] = end_s
        self.trace.spans.append(Span(task, rank, start_s, end_s))
        return end_s

    def send(self, source: Task, to: int) -> list[float]:
        """Queues the output of the rank's last launch, for when it exists.

        Returns:
          When it is there, by member.
        """
        kind, stage, j = source
        sender, receiver = self._placement[stage], self._placement[to]
        exists_s = self._rank_free_s[sender]
        links_s = self._links_free_s.get((sender, receiver))
        if links_s is None:
            links_s = [0.0] * len(self._transfers)
        key = (kind, stage, to)
        arrivals_s = [
            (exists_s if exists_s > free_s else free_s) + each[key][j]
            for free_s, each in zip(links_s, self._transfers, strict=True)
        ]
        self._links_free_s[sender, receiver] = arrivals_s
        begins_s = max(exists_s, min(links_s))
        last_s = max(arrivals_s)
        self.trace.transfers.append(Transfer(source, to, begins_s, last_s))
        return arrivals_s
