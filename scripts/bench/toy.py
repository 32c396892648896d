"""The tiny pipeline that the benchmarks run: what is left to measure is the host."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax import Pipeline, Stage, split


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
    kind: type[Pipeline] = Pipeline,
    placement: Sequence[int] | None = None,
) -> tuple[Pipeline, Any, Any]:
    """Returns a pipeline, its parameters on their devices, and its microbatches.

    One stage a rank, unless a placement says otherwise.
    """
    num_stages = num_ranks if placement is None else len(placement)
    keys = jax.random.split(jax.random.key(0), num_stages)
    params = [jax.random.normal(key, (8, 8)) for key in keys]
    rest = [*[middle] * (num_stages - 2), last]
    unfed = [Stage(fn, select=lambda _: None) for fn in rest]
    pipeline = kind([first, *unfed], params, placement=placement)
    batch = {"x": np.ones((num_microbatches * 2, 8), np.float32)}
    return pipeline, pipeline.place(params), split(batch, num_microbatches)
