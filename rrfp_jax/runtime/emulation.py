"""Stretches a step to a cost model, in real time.

The programs are small ones that really run; what they and their payloads take, and what
they keep, is that of a bigger model.
"""

import dataclasses
from collections.abc import Callable, Collection

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.runtime.devices import Devices, EmulatedDevices
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.sim.machine import Blocking, Machine, Overlapped
from rrfp_jax.transport.base import Transport


@dataclasses.dataclass(frozen=True)
class Emulation:
    """What a pipeline pretends.

    Attributes:
      costs: returns the durations of the tasks of a graph.
      blocking: whether a transfer occupies both ranks.
      residuals: returns what the tasks keep, as limits and traces count it; None for
        what the programs that run keep.
    """

    costs: Callable[[PipelineGraph], CostTable]
    blocking: bool = False
    residuals: Callable[[PipelineGraph], Residuals] | None = None

    def devices(
        self,
        graph: PipelineGraph,
        here: Collection[int],
        transport: Transport,
        start_s: float,
    ) -> Devices:
        """Returns the emulated devices of the ranks `here`, for one step."""
        costs = self.costs(graph)
        machine: Machine
        if self.blocking:
            machine = Blocking(graph, costs)
        else:
            machine = Overlapped(graph, costs, here)
        return EmulatedDevices(machine, transport, start_s)
