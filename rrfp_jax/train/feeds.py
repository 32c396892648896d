"""From the data's microbatches to what the stages are fed."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.data.buckets import Bucket
from rrfp_jax.data.microbatch import Microbatch

Arrays = dict[str, Any]


def feeds(
    microbatches: Sequence[Microbatch], seed: int | None, step: int, first: int = 0
) -> list[Arrays]:
    """Returns the arrays of each microbatch, with its dropout key.

    Args:
      microbatches: of one step, of one replica.
      seed: of dropout; None for no dropout at all.
      step: the current one; keys are folded from (seed, step, microbatch), and layers
        fold in their own global index.
      first: the number of the first of them among those of all replicas.
    """
    arrays = [dict(microbatch.arrays) for microbatch in microbatches]
    if seed is not None:
        keys = np.asarray(_keys(seed, step, first, len(microbatches)))
        for each, key in zip(arrays, keys, strict=True):
            each["dropout_key"] = key
    return arrays


@functools.partial(jax.jit, static_argnums=3)
def _keys(seed: int, step: int, first: int, count: int) -> jax.Array:
    """Returns raw threefry key data, uint32[count, 2]."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)
    folded = jax.vmap(functools.partial(jax.random.fold_in, key))(
        first + np.arange(count)
    )
    return jax.random.key_data(folded)


def example(
    bucket: Bucket,
    image_size: tuple[int, int],
    channels: int,
    has_dropout: bool,
) -> Arrays:
    """Returns the shapes of a microbatch of a bucket, to compile for."""
    text = (bucket.rows, bucket.length)
    shapes: Arrays = {
        name: jax.ShapeDtypeStruct(text, np.int32)
        for name in ("tokens_BL", "labels_BL", "positions_BL", "segment_ids_BL")
    }
    shapes["mask_BL"] = jax.ShapeDtypeStruct(text, np.float32)
    if bucket.num_images:
        images = (bucket.num_images, *image_size, channels)
        shapes["images_NHWC"] = jax.ShapeDtypeStruct(images, np.float32)
        shapes["image_index_BL"] = jax.ShapeDtypeStruct(text, np.int32)
    if has_dropout:
        shapes["dropout_key"] = jax.ShapeDtypeStruct((2,), np.uint32)
    return shapes
