"""A host that learns of ends late, as a real one does."""

import math

from rrfp_jax.core import policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Task
from rrfp_jax.core.trace import Told, Trace
from rrfp_jax.sim import simulator
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim.machine import Machine, Overlapped


def simulate(
    graph: PipelineGraph,
    policy: Policy,
    costs: CostTable,
    latency_s: float,
    residuals: Residuals | None = None,
) -> Trace:
    """Simulates one step, as `simulator.simulate` does, under a host that is late.

    Args:
      graph: the tasks of the step; the policy has split it.
      policy: how each rank chooses.
      costs: how long everything takes.
      latency_s: from an end on a device to what the host launches then.
      residuals: what tasks keep, for a limit in bytes and for the trace.

    Raises:
      ConfigError: the policy does not fit the graph, or its limit the residuals.
    """
    machine = Late(Overlapped(graph, costs), latency_s)
    machine.trace.residuals = residuals
    return simulator.drive(policies.dispatchers(graph, policy, residuals), machine)


def step_s(trace: Trace) -> float:
    """Returns when the host knew that the step had ended."""
    return max((told.time_s for told in trace.log), default=0.0)


class Late:
    """A machine of whose events one is told a little later.

    Devices and links are not slowed: what was launched ahead begins in time.

    Args:
      machine: the devices.
      latency_s: from an event to its being told.
    """

    def __init__(self, machine: Machine, latency_s: float) -> None:
        self.trace: Trace = machine.trace
        self._machine = machine
        self._latency_s = latency_s

    def launch(self, task: Task, now_s: float) -> None:
        """Queues `task` on its rank."""
        self._machine.launch(task, now_s)

    def send(self, source: Task, to: int, now_s: float) -> float | None:
        """Queues the output of `source` for stage `to`."""
        return self._machine.send(source, to, now_s)

    def expect(self, source: Task, to: int, due_s: float) -> None:
        """Learns what arrives from another machine, and when."""
        self._machine.expect(source, to, due_s)

    def next_due_s(self) -> float | None:
        """Returns when one is told of something next; None if nothing is under way."""
        due_s = self._machine.next_due_s()
        return None if due_s is None else due_s + self._latency_s

    def pop(self, until_s: float) -> Told | None:
        """Removes and returns the next event of which one is told by `until_s`."""
        # Rounded up, so that what is due by `next_due_s` is due by this too.
        due_s = math.nextafter(until_s - self._latency_s, math.inf)
        told = self._machine.pop(due_s)
        return told and told._replace(time_s=told.time_s + self._latency_s)
