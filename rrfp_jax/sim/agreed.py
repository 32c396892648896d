"""Simulates ranks of several processes that have to agree on what they launch.

The members of a rank run each task together, since it has collectives among them, but
each has its own links and learns of arrivals at its own time. With a dispatcher a
member and a letter an event (`sim.members`), groups of 8 take fifty times as long to
simulate as single processes. Here a rank has one dispatcher, and a round of
`core.agreement` is one event (`sim.as_one`): four times as long.

This is exact: `tests/sim/test_agreed.py` holds it to the state machines themselves, and
says how far off it is where letters vary. Host time is not modelled.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

from rrfp_jax.core import policies
from rrfp_jax.core.dispatcher import Dispatcher, explain_stall
from rrfp_jax.core.events import (
    Arrived,
    Event,
    Finished,
    Launch,
    Send,
    Started,
)
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError, StallError
from rrfp_jax.sim.as_one import AsOne
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim.lockstep import Lockstep
from rrfp_jax.sim.simulator import without_cycle_collection

# Of one instant: what becomes known, what frees a rank, then what was said meanwhile.
_ARRIVED, _FINISHED, _CLOSED = 0, 1, 2
# When, of what kind, a number, of which rank; None for the end of a round; when an
# input that the first member has now is at each of them.
_Due = tuple[float, int, int, int, Event | None, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Agreed:
    """A step of which every rank is a group.

    Attributes:
      trace: its spans and transfers (until the last member has them); no log.
      num_rounds: of agreement, by rank.
      num_letters: from member to member, by rank.
    """

    trace: Trace
    num_rounds: tuple[int, ...]
    num_letters: tuple[int, ...]


def simulate(
    graph: PipelineGraph,
    policy: Policy,
    costs: CostTable,
    transfers: Sequence[CostTable],
    letter_s: float,
    residuals: Residuals | None = None,
) -> Agreed:
    """Simulates one step of ranks that are groups.

    Args:
      graph: the tasks of the step; its backward is split as the policy says.
      policy: how each rank chooses.
      costs: how long tasks take.
      transfers: by member, how long its part of each payload takes.
      letter_s: from one member of a group to another.
      residuals: what tasks keep, for a limit in bytes and for the trace.

    Raises:
      ConfigError: the policy does not fit the graph, or agrees in another way, or a
        group has less than two members.
      StallError: tasks remain and nothing can become ready.
    """
    if policy.agreement != "intersection" or not 0 <= letter_s < math.inf:
        raise ConfigError(
            f"pipeline.agreement={policy.agreement} with letters of {letter_s} s is "
            "not modelled.\n  Set --config.pipeline.agreement=intersection and letters "
            "of 0 s or more, or use sim.members, which runs every member."
        )
    graph = policy.applied_to(graph)
    devices = Lockstep(graph, costs, transfers)
    devices.trace.residuals = residuals
    ahead = policy.launch_ahead
    groups, dispatchers = [], []
    for rank, arbiter in enumerate(policies.arbiters_for(graph, policy, residuals)):
        groups.append(AsOne(len(transfers), letter_s, arbiter, ahead))
        dispatchers.append(Dispatcher(graph, rank, arbiter, ahead, groups[-1]))
    with without_cycle_collection():
        _Step(dispatchers, groups, devices, letter_s).run()
    if not all(dispatcher.is_done for dispatcher in dispatchers):
        raise StallError(explain_stall(dispatchers))
    size = len(transfers)
    return Agreed(
        devices.trace,
        tuple(group.num_rounds for group in groups),
        tuple(group.num_rounds * size * (size - 1) for group in groups),
    )


class _Step:
    def __init__(
        self,
        dispatchers: Sequence[Dispatcher],
        groups: Sequence[AsOne],
        devices: Lockstep,
        letter_s: float,
    ) -> None:
        self._dispatchers, self._groups = dispatchers, groups
        self._devices, self._letter_s = devices, letter_s
        self._due: list[_Due] = []
        self._count = 0

    def run(self) -> None:
        """Runs until nothing is under way."""
        for rank in range(len(self._groups)):
            self._post(0.0, _ARRIVED, rank, Started())
        while self._due:
            now_s, _, _, rank, event, arrivals_s = heapq.heappop(self._due)
            group = self._groups[rank]
            group.now_s, begins_s = now_s, group.begins_s
            if event is None:
                if begins_s + self._letter_s != now_s:
                    continue  # it began earlier than was thought
                begins_s, event = math.inf, group.close()
            elif isinstance(event, Arrived):
                group.foresee(event, arrivals_s)
            if event is not None:
                self._tell(rank, group, event)
            if group.begins_s != begins_s and group.begins_s < math.inf:
                self._post(group.begins_s + self._letter_s, _CLOSED, rank, None)

    def _tell(self, rank: int, group: AsOne, event: Event) -> None:
        for instruction in self._dispatchers[rank].handle(event):
            if isinstance(instruction, Launch):
                end_s = self._devices.launch(instruction.task, group.launches_s)
                self._post(end_s, _FINISHED, rank, Finished(instruction.task))
            elif isinstance(instruction, Send):
                source, to = instruction
                at_s = self._devices.send(source, to)
                target = self._devices.rank_of(to)
                self._post(min(at_s), _ARRIVED, target, Arrived(source, to), at_s)

    def _post(
        self,
        at_s: float,
        order: int,
        rank: int,
        event: Event | None,
        arrivals_s: Sequence[float] = (),
    ) -> None:
        self._count += 1
        entry = (at_s, order, self._count, rank, event, arrivals_s)
        heapq.heappush(self._due, entry)
