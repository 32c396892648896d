"""Runs the dispatchers of a pipeline in virtual time."""

import contextlib
import gc
import math
from collections.abc import Iterator, Sequence

from rrfp_jax.core.dispatcher import Dispatcher, explain_stall
from rrfp_jax.core.events import Launch, Send, Started
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.policies import dispatchers as dispatchers_for
from rrfp_jax.core.trace import Told, Trace
from rrfp_jax.errors import StallError
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim.machine import Blocking, Machine, Overlapped


def simulate(
    graph: PipelineGraph,
    policy: Policy,
    costs: CostTable,
    blocking: bool = False,
    residuals: Residuals | None = None,
) -> Trace:
    """Simulates one step.

    Args:
      graph: the tasks of the step; its backward is split as the policy says.
      policy: how each rank chooses.
      costs: how long everything takes.
      blocking: whether a transfer occupies both ranks, or overlaps with compute.
      residuals: what tasks keep, for a limit in bytes and for the trace.

    Returns:
      The trace, equal for equal arguments.

    Raises:
      ConfigError: the policy does not fit the graph.
      StallError: tasks remain and nothing can become ready.
    """
    graph = policy.applied_to(graph)
    machine = Blocking(graph, costs) if blocking else Overlapped(graph, costs)
    machine.trace.residuals = residuals
    return drive(dispatchers_for(graph, policy, residuals), machine)


def drive(dispatchers: Sequence[Dispatcher], machine: Machine) -> Trace:
    """Runs dispatchers on a machine to the end of the step and returns the trace.

    Raises:
      StallError: tasks remain and nothing is under way.
    """
    with without_cycle_collection():
        return _drive(dispatchers, machine)


def _drive(dispatchers: Sequence[Dispatcher], machine: Machine) -> Trace:
    trace = machine.trace
    record, launch, send = trace.log.append, machine.launch, machine.send
    handlers = [dispatcher.handle for dispatcher in dispatchers]

    def tell(told: Told) -> None:
        record(told)
        now_s, rank, event = told
        for instruction in handlers[rank](event):
            if isinstance(instruction, Launch):
                launch(instruction.task, now_s)
            elif isinstance(instruction, Send):
                send(instruction.source, instruction.to, now_s)

    for rank in range(len(dispatchers)):
        tell(Told(0.0, rank, Started()))
    while (told := machine.pop(math.inf)) is not None:
        tell(told)
    if not all(dispatcher.is_done for dispatcher in dispatchers):
        raise StallError(explain_stall(dispatchers))
    return trace


@contextlib.contextmanager
def without_cycle_collection() -> Iterator[None]:
    """Pauses the cyclic collector: a step makes many tuples and no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
