"""Tiny models and feeds for the tests of models/; all of them seeded."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models import config

LANGUAGE = config.LanguageConfig(
    vocab_size=24,
    num_layers=2,
    width=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_width=20,
    max_length=12,
)
VISION = config.VisionConfig(
    image_size=(4, 6),
    channels=3,
    patch_size=2,
    width=8,
    num_layers=1,
    num_heads=2,
    mlp_width=12,
)


@pytest.fixture(autouse=True)
def exact_matmuls() -> Iterator[None]:
    """Accelerators multiply float32 in a shorter format unless told otherwise."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def make_language() -> Callable[..., config.LanguageConfig]:
    def make(kind: str = "llama", **changes: Any) -> config.LanguageConfig:
        if kind == "gpt3":
            changes.setdefault("num_kv_heads", LANGUAGE.num_heads)
        return dataclasses.replace(LANGUAGE, kind=config.LanguageKind(kind), **changes)

    return make


@pytest.fixture
def make_vision() -> Callable[..., config.VisionConfig]:
    def make(**changes: Any) -> config.VisionConfig:
        return dataclasses.replace(VISION, **changes)

    return make


@pytest.fixture
def make_feed() -> Callable[..., dict[str, jax.Array]]:
    """Two rows of two segments and padding; with two images in the first row."""

    def make(num_images: int = 0, length: int = 10) -> dict[str, jax.Array]:
        rng = np.random.default_rng(7)
        segment_ids = np.zeros((2, length), np.int32)
        segment_ids[0] = [1] * (length - 3) + [2] * 3
        segment_ids[1, : length - 2] = [1] * 4 + [2] * (length - 6)
        starts = np.diff(segment_ids, axis=1, prepend=-1) != 0
        index = np.arange(length)
        first = np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        image_index = np.full((2, length), -1, np.int32)
        if num_images:
            num_places = VISION.tokens_per_image
            image_index[0, 1 : 1 + num_places] = num_places + np.arange(num_places)
            image_index[1, 2 : 2 + num_places] = np.arange(num_places)
        shape = (num_images, *VISION.image_size, VISION.channels)
        feed = {
            "tokens_BL": rng.integers(0, LANGUAGE.vocab_size, (2, length)),
            "labels_BL": rng.integers(0, LANGUAGE.vocab_size, (2, length)),
            "mask_BL": ((segment_ids > 0) & (index % 3 > 0)).astype(np.float32),
            "positions_BL": index - first,
            "segment_ids_BL": segment_ids,
        }
        if num_images:
            feed["image_index_BL"] = image_index
            feed["images_NHWC"] = rng.normal(size=shape).astype(np.float32)
        return {
            name: jnp.asarray(array, jnp.float32 if array.dtype.kind == "f" else "i4")
            for name, array in feed.items()
        }

    return make


@pytest.fixture
def randomise() -> Callable[..., Any]:
    """Replaces initial values (zeros, ones) by ones that no mistake survives."""

    def values_like(params: Any, scale: float = 1.0) -> Any:
        rng = np.random.default_rng(3)
        leaves, tree = jax.tree.flatten(params)
        drawn = [
            (scale * rng.normal(0.3, 0.4, leaf.shape)).astype("f4") for leaf in leaves
        ]
        return jax.tree.unflatten(tree, drawn)

    return values_like
