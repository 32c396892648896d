"""Simulated runs to look at."""

import pytest

from rrfp_jax.core import graph, memory, placement, policies
from rrfp_jax.sim import costs, simulator


@pytest.fixture
def simulate():
    """Returns a function that simulates a jittered step."""

    def run(
        num_ranks,
        num_microbatches,
        order="readiness",
        placed=None,
        hint="bf",
        forward_bytes=None,
    ):
        policy = policies.Policy(hint=hint, order=order)
        placed = placed or placement.one_each(num_ranks)
        steps = policy.applied_to(graph.chain(num_microbatches, placed))
        drawn = costs.constant(steps, 0.010, 0.020, 0.001, 0.010 * steps.is_split)
        drawn = costs.with_lognormal(drawn, 0.3, seed=0)
        drawn = costs.with_lognormal_transfers(drawn, 1.0, seed=0)
        kept = forward_bytes and memory.constant(steps, forward_bytes, 0.5)
        return simulator.simulate(steps, policy, drawn, residuals=kept)

    return run
