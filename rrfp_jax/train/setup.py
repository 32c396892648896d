"""From a config to what a run is made of: the process, then data, model and pipeline.

Whoever trains, and whoever only looks, starts here. No stage is compiled; but where
`pipeline.balance` is `measured`, single layers are, to be timed.
"""

import dataclasses
import logging as std_logging
import math
import pathlib
from collections.abc import Mapping, Sequence

import jax
from absl import logging

from rrfp_jax.coordination import layout as layout_lib
from rrfp_jax.coordination.cluster import Cluster, alone, devices
from rrfp_jax.core import dry_run, policies
from rrfp_jax.core.task import Kind, Task
from rrfp_jax.data import buckets as buckets_lib
from rrfp_jax.data import dataset
from rrfp_jax.data.share import Share
from rrfp_jax.data.tokenizer import check_vocabulary
from rrfp_jax.models.layer import Model, Shape
from rrfp_jax.models.model import build
from rrfp_jax.runtime import placing, wire
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.runtime.replicas import Replicas
from rrfp_jax.train import feeds, profile, stages
from rrfp_jax.train.config import ModelConfig, TrainConfig
from rrfp_jax.transport.pulls import Pulls


def prepare(config: TrainConfig) -> None:
    """Sets what must be set before JAX is first used, and what is logged."""
    mesh = config.mesh
    needed = config.pipeline.num_ranks * mesh.data * mesh.model * mesh.replicas
    each = math.ceil(needed / config.cluster.whereabouts.count)
    jax.config.update("jax_num_cpu_devices", mesh.num_cpu_devices or each)
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
      cluster: the processes of the run.
      replicas: the devices of each pipeline rank, in all replicas.
      pipelines: by replica, those that this process has a part in; nothing is compiled.
    """

    config: TrainConfig
    data: dataset.Data
    model: Model
    cut: stages.Cut
    cluster: Cluster
    replicas: Sequence[Replicas]
    pipelines: Mapping[int, Pipeline]

    @property
    def pipeline(self) -> Pipeline:
        """Any of the pipelines: but for their devices they are alike."""
        return next(iter(self.pipelines.values()))

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything, and so needs keys."""
        return _has_dropout(self.config.model)

    def examples(self, has_dropout: bool) -> list[feeds.Arrays]:
        """Returns the shapes of a microbatch of each bucket."""
        return _examples(self.config, self.data, has_dropout)


def set_up(
    config: TrainConfig,
    timer: profile.Timer = profile.median_seconds,
    cluster: Cluster | None = None,
) -> Setup:
    """Builds the parts of a run.

    Args:
      config: all of it.
      timer: of layers, where their balance is to be measured.
      cluster: the processes of the run; None for this one alone.

    Raises:
      ConfigError: the config, the data or the machines do not make a run.
    """
    cluster = cluster or alone()
    model = build(config.model.language, config.model.vision)
    possible = buckets_lib.buckets(config.data, config.num_microbatches)
    largest = max(possible, key=lambda b: (b.num_images, b.length))
    shape = Shape(largest.rows, largest.length, largest.num_images)
    costs = stages.flops(model, config.model.frozen, shape)
    cut = stages.cut_model(model, config.model, config.pipeline, costs)
    replicas = _placed(config, cut, cluster)
    here = [q for q in range(config.mesh.replicas) if _has_part(replicas, q)]
    share = Share(tuple(here), config.mesh.replicas)
    data = dataset.open_data(config.data, config.num_microbatches, share)
    check_vocabulary(data.tokenizer, config.model.language.vocab_size)
    setup = Setup(config, data, model, cut, cluster, replicas, {})
    setup = _with_pipelines(setup, costs)
    if config.pipeline.balance != "measured":
        return setup
    if config.pipeline.layer_counts:
        logging.warning("pipeline.balance=measured: layer_counts leave nothing to cut")
        return setup
    # Only now, since all that is wrong with the config has been found.
    example = setup.examples(setup.has_dropout)[data.buckets.index(largest)]
    measured = None
    if cluster.is_first:
        measured = profile.layer_seconds(model, config.model, example, timer)
    seconds = dict(cluster.all_gather(measured)[0])
    cut = stages.cut_model(model, config.model, config.pipeline, seconds)
    setup = _with_pipelines(dataclasses.replace(setup, cut=cut), seconds)
    for stage, layers in enumerate(cut.layers):
        times = [f"{x.name} {seconds[x.name] * 1e3:.3g} ms" for x in layers]
        logging.info("stage %d, as measured: %s", stage, ", ".join(times))
    return setup


def _placed(
    config: TrainConfig, cut: stages.Cut, cluster: Cluster
) -> tuple[Replicas, ...]:
    """Returns the devices of each pipeline rank, and says which they are."""
    mesh = config.mesh
    ways = [
        mesh.vision_model or mesh.model if towers == {"vision"} else mesh.model
        for towers in cut.towers_by_rank()
    ]
    sizes = [mesh.data * model for model in ways]
    layout, doubts = layout_lib.lay_out(cluster.spots, sizes, mesh.replicas)
    for process in range(cluster.num_processes):
        cluster.names[process] = layout_lib.held_by(layout, process)
    for doubt in doubts:
        logging.warning("%s", doubt)
    if cluster.num_processes > 1 and cluster.is_first:
        logging.info("who runs what:\n%s", layout_lib.table(layout, ways))
    all_devices = devices()
    return tuple(
        Replicas(
            tuple(
                placing.mesh_of(
                    [all_devices[spot.number] for spot in ranks[rank]], mesh.data, model
                )
                for ranks in layout
            )
        )
        for rank, model in enumerate(ways)
    )


def _has_part(replicas: Sequence[Replicas], replica: int) -> bool:
    return any(each.ranks[replica].is_here for each in replicas)


def _with_pipelines(setup: Setup, costs: stages.LayerCosts) -> Setup:
    """Returns the setup with the pipelines of its cut."""
    config, cut = setup.config, setup.cut
    shapes = jax.eval_shape(lambda: setup.model.init(jax.random.key(0)))
    by_stage = cut.by_stage(shapes)
    without_images = cut.without_images()
    way = _way(config, setup.cluster)
    pipelines = {}
    for q in setup.data.share.parts:
        ranks = [each.ranks[q] for each in setup.replicas]
        pipelines[q] = Pipeline(
            cut.stages(config.model.recompute),
            by_stage,
            edges=cut.edges,
            placement=cut.placement,
            policy=config.pipeline.policy,
            ranks=ranks,
            partition=cut.partition(by_stage),
            tied=cut.tied,
            skips=lambda m: () if "images_NHWC" in m else without_images,
            wire=_wire(setup.cluster, q, ranks, way),
        )
    setup = dataclasses.replace(setup, pipelines=pipelines)
    pipeline, count = setup.pipeline, config.pipeline.num_microbatches
    pipeline.check(count)
    if config.pipeline.memory_limit_gb:
        # A step may have any mixture; the worst is one of the largest microbatch only.
        for example in setup.examples(setup.has_dropout):
            pipeline.check_memory([example] * count)
    if config.pipeline.order != "readiness" and setup.cluster.is_first:
        _log_order(pipeline, count, cut, costs)
    return setup


def _way(config: TrainConfig, cluster: Cluster) -> wire.Way:
    payloads = config.cluster.payloads
    if cluster.desk is None or payloads == "host":
        return wire.Way()
    is_direct = payloads == "auto" and jax.default_backend() != "cpu"
    return wire.Way(
        Pulls(cluster.address),
        0 if is_direct else config.cluster.host_limit_kib << 10,
        config.pipeline.in_flight_limit,
    )


def _wire(
    cluster: Cluster, replica: int, ranks: Sequence[placing.RankMesh], way: wire.Way
) -> wire.Wire | None:
    """Returns the connections of a pipeline; None if it is in this process alone."""
    processes = {process for rank in ranks for process in rank.processes}
    if cluster.desk is None or len(processes) == 1:
        return None
    return wire.connect(cluster.desk, replica, ranks, way)


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
