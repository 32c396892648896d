"""Simulates every member of every rank: the state machines of the launch agreement
themselves, with a letter an event.

With groups of 8 it takes thirteen times as long as the model in `sim.agreed`, which is
held to it.
"""

import collections
import heapq
from collections.abc import Callable, Sequence

from rrfp_jax.core import policies
from rrfp_jax.core.agreement import Group
from rrfp_jax.core.dispatcher import explain_stall
from rrfp_jax.core.events import (
    Arrived,
    Event,
    Finished,
    Instruction,
    Launch,
    Propose,
    Proposed,
    Send,
    Started,
)
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Task
from rrfp_jax.errors import ConfigError, StallError
from rrfp_jax.sim.agreed import Agreed
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim.lockstep import Lockstep
from rrfp_jax.sim.simulator import without_cycle_collection

_ARRIVED, _FINISHED, _PROPOSED = 0, 1, 2  # as in `sim.agreed`


def simulate(
    graph: PipelineGraph,
    policy: Policy,
    costs: CostTable,
    transfers: Sequence[CostTable],
    letter_s: Callable[[], float],
) -> Agreed:
    """Simulates one step of ranks that are groups, by all agreements but `off`.

    Args:
      graph: the tasks of the step; its backward is split as the policy says.
      policy: how each rank chooses, and its members agree.
      costs: how long tasks take.
      transfers: by member, how long its part of each payload takes.
      letter_s: returns how long the next letter takes.

    Raises:
      ConfigError: the policy does not fit the graph, or lets members go apart, or a
        group has less than two.
      StallError: tasks remain and nothing can become ready.
    """
    if policy.agreement == "off":
        raise ConfigError(
            "pipeline.agreement=off: members that launch different tasks hang.\n"
            "  Set --config.pipeline.agreement=intersection, or per_task."
        )
    graph = policy.applied_to(graph)
    devices = Lockstep(graph, costs, transfers)
    with without_cycle_collection():
        return _Members(graph, policy, devices, len(transfers), letter_s).run()


class _Members:
    def __init__(
        self,
        graph: PipelineGraph,
        policy: Policy,
        devices: Lockstep,
        size: int,
        letter_s: Callable[[], float],
    ) -> None:
        ranks = range(graph.num_ranks)
        self._members = range(size)
        self._dispatchers = [  # by member, then rank
            policies.dispatchers(
                graph, policy, groups=dict.fromkeys(ranks, Group(member, size))
            )
            for member in self._members
        ]
        self._devices, self._letter_s = devices, letter_s
        self._num_rounds = [0] * graph.num_ranks
        self._num_letters = [0] * graph.num_ranks
        self._due: list[tuple[float, int, int, int, int, Event]] = []
        self._count = 0
        self._launched: collections.Counter[Task] = collections.Counter()

    def run(self) -> Agreed:
        """Runs until nothing is under way."""
        for rank in range(len(self._num_rounds)):
            for member in self._members:
                self._post(0.0, _ARRIVED, rank, member, Started())
        while self._due:
            now_s, _, _, rank, member, event = heapq.heappop(self._due)
            for instruction in self._dispatchers[member][rank].handle(event):
                self._do(now_s, rank, member, instruction)
        for each in self._dispatchers:
            if not all(dispatcher.is_done for dispatcher in each):
                raise StallError(explain_stall(each))
        rounds, letters = tuple(self._num_rounds), tuple(self._num_letters)
        return Agreed(self._devices.trace, rounds, letters)

    def _do(
        self, now_s: float, rank: int, member: int, instruction: Instruction
    ) -> None:
        match instruction:
            case Launch(task):
                self._launched[task] += 1
                if self._launched[task] == len(self._members):
                    end_s = self._devices.launch(task, now_s)
                    for each in self._members:
                        self._post(end_s, _FINISHED, rank, each, Finished(task))
            case Send(source, to):
                if self._launched[source] == len(self._members):
                    arrivals_s = self._devices.send(source, to)
                    for each, at_s in enumerate(arrivals_s):
                        target = self._devices.rank_of(to)
                        self._post(at_s, _ARRIVED, target, each, Arrived(source, to))
            case Propose(proposal):
                self._num_rounds[rank] = proposal.round + 1
                for other in self._members:
                    if other != member:
                        self._num_letters[rank] += 1
                        due_s = now_s + self._letter_s()
                        told = Proposed(member, proposal)
                        self._post(due_s, _PROPOSED, rank, other, told)

    def _post(
        self, at_s: float, order: int, rank: int, member: int, event: Event
    ) -> None:
        self._count += 1
        heapq.heappush(self._due, (at_s, order, self._count, rank, member, event))
