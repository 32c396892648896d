"""Models of the package as pipelines whose four ranks share one device."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax import Pipeline
from rrfp_jax.models.layer import Model, Shape
from rrfp_jax.runtime import placing
from rrfp_jax.train import stages
from rrfp_jax.train.config import ModelConfig, PipelineConfig
from scripts.gpu.sizes import Text

NUM_RANKS = 4
Arrays = dict[str, Any]


def ranks() -> list[placing.RankMesh]:
    """Returns the ranks: all of them are the first device."""
    return placing.make_ranks(1) * NUM_RANKS


@dataclasses.dataclass(frozen=True)
class Piped:
    """A model as a pipeline, one stage a rank.

    Attributes:
      cut: of the model into stages.
      pipeline: with any policy; set another as you like.
      params: by stage, on the device.
    """

    cut: stages.Cut
    pipeline: Pipeline
    params: Sequence[Any]


def piped(
    model: Model, config: ModelConfig, params: Mapping[str, Any], text: Text
) -> Piped:
    """Cuts a model by its FLOPs.

    Args:
      model: of the config.
      config: its settings.
      params: by layer.
      text: the steps.
    """
    shape = Shape(text.rows, text.length, text.rows if config.vision else 0)
    cut = stages.cut_model(
        model,
        config,
        PipelineConfig(NUM_RANKS, text.num_microbatches),
        stages.flops(model, config.frozen, shape),
    )
    by_stage = cut.by_stage(params)
    without_images = cut.without_images()
    pipeline = Pipeline(
        cut.stages(config.recompute),
        by_stage,
        edges=cut.edges,
        placement=cut.placement,
        ranks=ranks(),
        skips=lambda m: () if "images_NHWC" in m else without_images,
    )
    return Piped(cut, pipeline, pipeline.place(by_stage))


def text_microbatch(draw: np.random.Generator, text: Text) -> Arrays:
    """Returns random tokens, of which about four fifths count for the loss."""
    shape, vocab_size = (text.rows, text.length), text.language.vocab_size
    return {
        "tokens_BL": draw.integers(0, vocab_size, shape, np.int32),
        "labels_BL": draw.integers(0, vocab_size, shape, np.int32),
        "mask_BL": (draw.random(shape) < 0.8).astype(np.float32),
        "positions_BL": np.tile(np.arange(text.length, dtype=np.int32), (text.rows, 1)),
        "segment_ids_BL": np.ones(shape, np.int32),
    }


def scale_of(microbatches: Sequence[Arrays]) -> float:
    """Returns 1 / the number of tokens that count."""
    return 1 / float(sum(each["mask_BL"].sum() for each in microbatches))


def initialise(model: Model) -> dict[str, Any]:
    """Returns parameters by layer, on the first device."""
    params: dict[str, Any] = jax.jit(model.init)(jax.random.key(0))
    return params
