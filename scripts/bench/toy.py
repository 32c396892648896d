"""The tiny pipeline that the benchmarks run: what is left to measure is the host."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax import Emulation, Pipeline, Policy, Stage, split
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import simulator
from rrfp_jax.sim.costs import CostTable


def first(params: Any, _: Any, feed: Any) -> Any:
    """The stage that reads the microbatch."""
    return jnp.tanh(feed["x"] @ params)


def middle(params: Any, h: Any, _: Any) -> Any:
    """A stage of one 8 x 8 product."""
    return jnp.tanh(h @ params)


def last(params: Any, h: Any, _: Any) -> Any:
    """The loss."""
    return jnp.sum(jnp.tanh(h @ params) ** 2)


def make_pipeline(
    num_ranks: int,
    num_microbatches: int,
    make: Callable[..., Pipeline] = Pipeline,
    placement: Sequence[int] | None = None,
) -> tuple[Pipeline, Any, Any]:
    """Returns a pipeline, its parameters on their devices, and its microbatches.

    One stage a rank, unless a placement says otherwise. `make` may put it elsewhere.
    """
    num_stages = num_ranks if placement is None else len(placement)
    keys = jax.random.split(jax.random.key(0), num_stages)
    params = [jax.random.normal(key, (8, 8)) for key in keys]
    rest = [*[middle] * (num_stages - 2), last]
    unfed = [Stage(fn, select=lambda _: None) for fn in rest]
    pipeline = make([first, *unfed], params, placement=placement)
    batch = {"x": np.ones((num_microbatches * 2, 8), np.float32)}
    return pipeline, pipeline.place(params), split(batch, num_microbatches)


Costs = Callable[[PipelineGraph], CostTable]


class Ran(NamedTuple):
    """One step, in the runtime on emulated devices and in the simulator."""

    real_s: float
    simulated_s: float
    trace: Trace  # of the runtime


class Both:
    """Runs a policy in the runtime and in the simulator, on the same durations."""

    def __init__(
        self,
        num_ranks: int,
        num_microbatches: int,
        placement: Sequence[int] | None = None,
    ) -> None:
        self._pipeline, self._params, self._microbatches = make_pipeline(
            num_ranks, num_microbatches, placement=placement
        )

    def compile(self, policy: Policy) -> Trace:
        """Compiles what the policy needs, and returns a step without emulation."""
        return self._run(policy, None)

    def __call__(
        self,
        policy: Policy,
        costs: Costs,
        blocking: bool = False,
        residuals: Callable[[PipelineGraph], Residuals] | None = None,
    ) -> Ran:
        """Runs a step; the real makespan is when the host learns of the last finish."""
        trace = self.real(policy, costs, blocking, residuals)
        simulated_s = self.simulated_s(policy, costs, blocking, trace)
        return Ran(trace.log[-1].time_s, simulated_s, trace)

    def real(
        self,
        policy: Policy,
        costs: Costs,
        blocking: bool = False,
        residuals: Callable[[PipelineGraph], Residuals] | None = None,
    ) -> Trace:
        """Runs a step in the runtime alone."""
        return self._run(policy, Emulation(costs, blocking, residuals))

    def simulated_s(
        self, policy: Policy, costs: Costs, blocking: bool, of: Trace
    ) -> float:
        """Returns the simulator's makespan of the step that a trace is of."""
        graph = of.graph
        table = costs(graph)
        trace = simulator.simulate(graph, policy, table, blocking, of.residuals)
        return trace.makespan_s

    def _run(self, policy: Policy, emulation: Emulation | None) -> Trace:
        self._pipeline.policy, self._pipeline.emulation = policy, emulation
        return self._pipeline.run(self._params, self._microbatches).trace
