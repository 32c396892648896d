"""Draws the timeline in the README: BF beside fixed 1F1B, from the emulated runtime.

    python scripts/readme_timeline.py docs/timeline.png

8 ranks, 24 microbatches, tasks of 20/40 ms under jitter J3 (RRFP §7.6), transfers of
2 ms with CV 1, one seed. Both runs face the same delays. The programs really run; how
long a task occupies its rank is emulated.
"""

import sys

import jax

NUM_RANKS, NUM_MICROBATCHES, SEED = 8, 24, 0
jax.config.update("jax_num_cpu_devices", NUM_RANKS)  # before the first use

import jax.numpy as jnp
import numpy as np

from rrfp_jax import Emulation, Pipeline, Policy, split
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.observe import timeline
from rrfp_jax.sim import costs


def delays(graph: PipelineGraph) -> costs.CostTable:
    """Returns the durations of the picture."""
    table = costs.constant(graph, 20e-3, 40e-3, 2e-3)
    table = costs.with_injected(table, costs.LEVELS["J3"], SEED)
    return costs.with_lognormal_transfers(table, 1.0, SEED)


def main() -> None:
    """Runs both and draws them."""
    (path,) = sys.argv[1:]

    def stage(w: jax.Array, h: jax.Array | None, x: jax.Array) -> jax.Array:
        return jnp.tanh((x if h is None else h) @ w)

    def loss(w: jax.Array, h: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum((h @ w - x) ** 2)

    params = [np.eye(8, dtype=np.float32)] * NUM_RANKS
    microbatches = split(np.ones((NUM_MICROBATCHES, 8), np.float32), NUM_MICROBATCHES)
    pipeline = Pipeline([stage] * (NUM_RANKS - 1) + [loss], params)
    placed = pipeline.place(params)
    pipeline.compile(microbatches)
    pipeline.emulation = Emulation(delays)
    panels = []
    for title, policy in (
        ("readiness first, hint BF", Policy(hint="bf", in_flight_limit=16)),
        ("fixed 1F1B", Policy(hint="1f1b", order="fixed")),
    ):
        pipeline.policy = policy
        trace = pipeline.run(placed, microbatches).trace
        panels.append((title, trace))
    timeline.draw(panels, path)


if __name__ == "__main__":
    main()
