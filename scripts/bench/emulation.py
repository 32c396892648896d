"""Runs contenders in the runtime, on emulated devices, for the figures of the suite.

Whoever imports this has set `jax_num_cpu_devices` to the number of ranks.
"""

import functools

import toy
from suite import Contender, Ran

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import report
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.workloads.stage_times import Workload


class Field:
    """A pipeline of tiny programs, as slow and as big as a workload says.

    Args:
      workload: what they stand for.
      num_ranks: one stage each.
      num_microbatches: of a step.
    """

    def __init__(
        self, workload: Workload, num_ranks: int, num_microbatches: int
    ) -> None:
        self._workload = workload
        self._both = toy.Both(num_ranks, num_microbatches)
        for hint in ("bf", "bfw"):  # the whole backward and the split one
            self._both.compile(Policy(hint))

    def run(self, contender: Contender, seed: int) -> Ran:
        """Runs a step; its makespan ends when the host knows of its end."""
        trace = self.trace(contender, seed)
        figures = report.report(trace, contender.blocking)
        return Ran(trace.log[-1].time_s, figures)

    def trace(self, contender: Contender, seed: int) -> Trace:
        """Runs a step and returns its trace."""
        return self._both.real(
            contender.policy,
            functools.partial(self._draw, seed),
            contender.blocking,
            self._residuals,
        )

    def _draw(self, seed: int, graph: PipelineGraph) -> CostTable:
        return self._workload.draw(graph, seed)

    def _residuals(self, graph: PipelineGraph) -> Residuals:
        return self._workload.residuals(graph)
