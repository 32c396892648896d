"""Simulated runs to look at."""

import pytest

from rrfp_jax.core import graph, placement, policies
from rrfp_jax.sim import costs, simulator


@pytest.fixture
def simulate():
    """Returns a function that simulates a jittered step."""

    def run(num_ranks, num_microbatches, order="readiness", placed=None):
        placed = placed or placement.one_each(num_ranks)
        steps = graph.chain(num_microbatches, placed)
        drawn = costs.constant(steps, 0.010, 0.020, 0.001)
        drawn = costs.with_lognormal(drawn, 0.3, seed=0)
        drawn = costs.with_lognormal_transfers(drawn, 1.0, seed=0)
        return simulator.simulate(steps, policies.Policy(order=order), drawn)

    return run
