"""What a run would cost: compiles what it would run, and trains nothing."""

import contextlib
import dataclasses

from rrfp_jax.data.buckets import Bucket
from rrfp_jax.observe.progress import progress
from rrfp_jax.runtime import figures
from rrfp_jax.runtime.figures import KindCost
from rrfp_jax.train.config import PipelineConfig, TrainConfig
from rrfp_jax.train.setup import set_up


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a run would cost.

    Attributes:
      layers: the names of each stage's.
      num_params: of the model; a tied one counts once.
      buckets: the kinds of microbatches.
      kinds: their costs.
      pipeline: the settings that bytes depend on.
      is_split: whether the run's own backward is split.
    """

    layers: tuple[tuple[str, ...], ...]
    num_params: int
    buckets: tuple[Bucket, ...]
    kinds: tuple[KindCost, ...]
    pipeline: PipelineConfig
    is_split: bool

    @property
    def smallest_limit(self) -> int:
        """The least bytes of residuals on a rank that let every kind through."""
        return max(kind.smallest_limit for kind in self.kinds)


def _one_pipeline(config: TrainConfig) -> TrainConfig:
    """Returns the config of one replica, without a limit."""
    count = config.mesh.replicas
    batch_size = config.data.batch_size // count
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=batch_size),
        mesh=dataclasses.replace(config.mesh, replicas=1),
        pipeline=dataclasses.replace(config.pipeline, memory_limit_gb=0.0),
    )


def inspect(config: TrainConfig) -> Inspection:
    """Returns what a run would cost.

    The trainer's programs are compiled, with the backward split and whole. A limit in
    bytes is not applied, since what it must be is found here.

    Raises:
      ConfigError: the config, the data or the machine do not make a run.
    """
    setup = set_up(_one_pipeline(config))
    with contextlib.closing(setup.data.train):
        examples = setup.examples(setup.has_dropout)
        for is_split, what in ((True, "compile split"), (False, "compile whole")):
            total = setup.pipeline.num_uncompiled(examples, is_split=is_split)
            with progress(total, what, "program") as bar:
                setup.pipeline.programs(examples, is_split, bar.advance)
        kinds = figures.figures(
            setup.pipeline, examples, config.pipeline.num_microbatches
        )
    return Inspection(
        layers=tuple(tuple(x.name for x in layers) for layers in setup.cut.layers),
        num_params=setup.model.num_params,
        buckets=tuple(setup.data.buckets),
        kinds=tuple(kinds),
        pipeline=config.pipeline,
        is_split=setup.pipeline.policy.is_split,
    )
