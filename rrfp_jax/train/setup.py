"""From a config to what a run is made of: the process, then data, model and pipeline.

Whoever trains, and whoever only looks, starts here. No stage is compiled; but where
`pipeline.balance` is `measured`, single layers are, to be timed.
"""

import dataclasses
import logging as std_logging
import pathlib
from collections.abc import Sequence

import jax
from absl import logging

from rrfp_jax.core import dry_run, policies
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.data import dataset
from rrfp_jax.data.tokenizer import check_vocabulary
from rrfp_jax.models.layer import Model, Shape
from rrfp_jax.models.model import build
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.train import feeds, profile, stages
from rrfp_jax.train.config import ModelConfig, TrainConfig


def prepare(config: TrainConfig) -> None:
    """Sets what must be set before JAX is first used, and what is logged."""
    needed = config.pipeline.num_ranks * config.mesh.data * config.mesh.model
    jax.config.update("jax_num_cpu_devices", config.mesh.num_cpu_devices or needed)
    logging.set_verbosity(logging.INFO)
    logging.get_absl_handler().addFilter(_is_ours_or_serious)


def _is_ours_or_serious(record: std_logging.LogRecord) -> bool:
    """Orbax logs dozens of lines a checkpoint through the same logger."""
    ours = pathlib.Path(__file__).parents[1]
    return (
        record.levelno >= std_logging.WARNING
        or ours in pathlib.Path(record.pathname).parents
    )


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a run is made of.

    Attributes:
      config: what it was made from.
      data: opened; whoever has the setup closes `data.train`.
      model: whose layers the stages hold.
      cut: of the model.
      ranks: the devices of each pipeline rank.
      pipeline: of the stages; nothing is compiled.
    """

    config: TrainConfig
    data: dataset.Data
    model: Model
    cut: stages.Cut
    ranks: Sequence[placing.RankMesh]
    pipeline: Pipeline

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything, and so needs keys."""
        return _has_dropout(self.config.model)

    def examples(self, has_dropout: bool) -> list[feeds.Arrays]:
        """Returns the shapes of a microbatch of each bucket."""
        return _examples(self.config, self.data, has_dropout)


def set_up(config: TrainConfig, timer: profile.Timer = profile.median_seconds) -> Setup:
    """Builds the parts of a run.

    Args:
      config: all of it.
      timer: of layers, where their balance is to be measured.

    Raises:
      ConfigError: the config, the data or the machine do not make a run.
    """
    model = build(config.model.language, config.model.vision)
    data = dataset.open_data(config.data, config.pipeline.num_microbatches)
    check_vocabulary(data.tokenizer, config.model.language.vocab_size)
    largest = max(data.buckets, key=lambda b: (b.num_images, b.length))
    shape = Shape(largest.rows, largest.length, largest.num_images)
    ranks = placing.make_ranks(
        config.pipeline.num_ranks, config.mesh.data, config.mesh.model
    )
    costs = stages.flops(model, config.model.frozen, shape)
    setup = _cut_by(costs, config, data, model, ranks)
    if config.pipeline.balance != "measured":
        return setup
    if config.pipeline.layer_counts:
        logging.warning("pipeline.balance=measured: layer_counts leave nothing to cut")
        return setup
    # Only now, since all that is wrong with the config has been found.
    examples = setup.examples(setup.has_dropout)
    example = examples[data.buckets.index(largest)]
    seconds = profile.layer_seconds(model, config.model, example, timer)
    setup = _cut_by(seconds, config, data, model, ranks)
    for stage, layers in enumerate(setup.cut.layers):
        times = [f"{x.name} {seconds[x.name] * 1e3:.3g} ms" for x in layers]
        logging.info("stage %d, as measured: %s", stage, ", ".join(times))
    return setup


def _cut_by(
    costs: stages.LayerCosts,
    config: TrainConfig,
    data: dataset.Data,
    model: Model,
    ranks: Sequence[placing.RankMesh],
) -> Setup:
    """Returns the parts of a run whose stages are even by these costs."""
    cut = stages.cut_model(model, config.model, config.pipeline, costs)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    by_stage = cut.by_stage(shapes)
    without_images = cut.without_images()
    pipeline = Pipeline(
        cut.stages(config.model.recompute),
        by_stage,
        edges=cut.edges,
        placement=cut.placement,
        policy=config.pipeline.policy,
        ranks=ranks,
        partition=cut.partition(by_stage),
        tied=cut.tied,
        skips=lambda m: () if "images_NHWC" in m else without_images,
    )
    pipeline.check(config.pipeline.num_microbatches)
    if config.pipeline.memory_limit_gb:
        # A step may have any mixture; the worst is one of the largest microbatch only.
        for example in _examples(config, data, _has_dropout(config.model)):
            pipeline.check_memory([example] * config.pipeline.num_microbatches)
    if config.pipeline.order != "readiness":
        _log_order(pipeline, config.pipeline.num_microbatches, cut, costs)
    return Setup(config, data, model, cut, ranks, pipeline)


def _log_order(
    pipeline: Pipeline, num_microbatches: int, cut: stages.Cut, costs: stages.LayerCosts
) -> None:
    """Says what the fixed order would take and hold at these costs, free transfers."""
    graph = pipeline.graph([()] * num_microbatches)
    of_stage = [sum(costs[layer.name] for layer in layers) for layers in cut.layers]
    orders = policies.checked_orders(graph, pipeline.policy).trace.launches()

    def seconds(task: Task) -> float:
        is_whole = task.kind is Kind.B and not graph.is_split
        return of_stage[task.stage] * (2 if is_whole else 1) / 3

    trace = dry_run.dry_run(orders, graph, seconds).trace
    work = sum(of_stage) * num_microbatches / graph.num_ranks
    logging.info(
        "order %s, run dry: %.3f of the work of a rank, %s microbatches in flight by "
        "rank",
        pipeline.policy.hint,
        trace.makespan_s / work,
        trace.peak_in_flight(),
    )


def _has_dropout(config: ModelConfig) -> bool:
    of_vision = config.vision.dropout if config.vision else 0.0
    return max(config.language.dropout, of_vision) > 0


def _examples(
    config: TrainConfig, data: dataset.Data, has_dropout: bool
) -> list[feeds.Arrays]:
    image = config.data.image_size, config.data.channels
    return [feeds.example(bucket, *image, has_dropout) for bucket in data.buckets]
