"""What a workload is, as frozen, validated data."""

import dataclasses
from typing import TypeVar

from rrfp_jax.errors import ConfigError, check_choice
from rrfp_jax.models.config import LanguageConfig, VisionConfig
from rrfp_jax.sim.costs import LEVELS

_Tower = TypeVar("_Tower", LanguageConfig, VisionConfig)


@dataclasses.dataclass(frozen=True)
class ModelDimensions:
    """The model, and what one sample brings it.

    Attributes:
      language: the language model.
      vision: the vision tower in front of it; None without one.
      tokens: of a sample's row, places of images included; rows are padded to it.
      images: of a sample, on average.
    """

    language: LanguageConfig
    vision: VisionConfig | None
    tokens: int
    images: float

    def __post_init__(self) -> None:
        _check_positive("model", self, "tokens")
        if self.vision is not None:
            _check_positive("model", self, "images")


@dataclasses.dataclass(frozen=True)
class Machine:
    """One kind of GPU and its links.

    Attributes:
      tflops: that a GPU reaches on a layer's matrix products, 1e12 FLOP/s.
      layer_ms: that a layer takes at least, forward or backward: its kernels must be
        launched, however small they are.
      tensor_gb_per_s: of an all-reduce inside a tensor-parallel group, 1e9 bytes/s of
        payload.
      link_gb_per_s: from pipeline rank to pipeline rank.
      link_ms: of each such transfer, however small.
    """

    tflops: float
    layer_ms: float
    tensor_gb_per_s: float
    link_gb_per_s: float
    link_ms: float

    def __post_init__(self) -> None:
        _check_positive("machine", self, "tflops", "tensor_gb_per_s", "link_gb_per_s")
        _check_not_negative("machine", self, "layer_ms", "link_ms")


@dataclasses.dataclass(frozen=True)
class Variation:
    """How durations vary from task to task; all lognormal of mean 1.

    Attributes:
      compute_cv: standard deviation over mean of each task.
      transfer_cv: of each transfer.
      image_cv: of the images of a microbatch, which make the vision tower's work.
    """

    compute_cv: float
    transfer_cv: float
    image_cv: float

    def __post_init__(self) -> None:
        _check_not_negative("variation", self, "compute_cv", "transfer_cv", "image_cv")


@dataclasses.dataclass(frozen=True)
class Row:
    """One way of spreading the workload over GPUs, as in RRFP's Tables 1 and 2.

    Attributes:
      table: 1 or 2.
      tensor, ranks, replicas: tensor-parallel ways, pipeline ranks, data-parallel ways.
      batch: samples of a step, one a microbatch.
    """

    table: int
    tensor: int
    ranks: int
    replicas: int
    batch: int

    @property
    def num_microbatches(self) -> int:
        """Of each replica."""
        return self.batch // self.replicas


@dataclasses.dataclass(frozen=True)
class WorkloadConfig:
    """A workload.

    Attributes:
      name: as the paper has it.
      model: its dimensions.
      machine: what it ran on.
      variation: how that varied.
      rows: (table, tensor, ranks, replicas, batch) of each row of the paper.
    """

    name: str
    model: ModelDimensions
    machine: Machine
    variation: Variation
    rows: tuple[tuple[int, int, int, int, int], ...]

    @property
    def runs(self) -> tuple[Row, ...]:
        """The rows by name."""
        return tuple(Row(*row) for row in self.rows)


@dataclasses.dataclass(frozen=True)
class EmulatedConfig:
    """A workload scaled to milliseconds, to be run on emulated devices.

    Attributes:
      workload: a variant of `workloads.py`, which lies beside this config.
      layer_fraction: of each tower's layers that there are.
      tensor, ranks, num_microbatches: how it is spread.
      transfer_factor: of the machine's transfers, where one row is to be met better
        than all rows together.
      transfer_cv, image_cv: instead of those of all rows.
      task_ms: what a stage's F, B and W take on average; every duration of the
        workload, of transfers and injected sleeps too, is scaled by the same number.
      level: of injected sleeps, J0 to J3 (RRFP §7.6).

    Raises:
      ConfigError: a value is out of range.
    """

    workload: str
    layer_fraction: float
    tensor: int
    ranks: int
    num_microbatches: int
    transfer_factor: float
    transfer_cv: float
    image_cv: float
    task_ms: float
    level: str

    def __post_init__(self) -> None:
        names = ("layer_fraction", "tensor", "ranks", "num_microbatches")
        _check_positive("", self, *names, "task_ms", "transfer_factor")
        check_choice("level", self.level, LEVELS)

    def applied_to(self, workload: WorkloadConfig) -> WorkloadConfig:
        """Returns the workload with fewer layers, and other transfers and images."""
        machine, model = workload.machine, workload.model
        vision = model.vision and self._shortened(model.vision)
        language = self._shortened(model.language)
        return dataclasses.replace(
            workload,
            model=dataclasses.replace(model, language=language, vision=vision),
            machine=dataclasses.replace(
                machine,
                link_ms=machine.link_ms * self.transfer_factor,
                link_gb_per_s=machine.link_gb_per_s / self.transfer_factor,
            ),
            variation=dataclasses.replace(
                workload.variation,
                transfer_cv=self.transfer_cv,
                image_cv=self.image_cv,
            ),
        )

    def _shortened(self, tower: _Tower) -> _Tower:
        num_layers = max(1, round(tower.num_layers * self.layer_fraction))
        return dataclasses.replace(tower, num_layers=num_layers)


def _check_positive(group: str, config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) > 0:
            _refuse(group, config, name, "is not positive", "above 0")


def _check_not_negative(group: str, config: object, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= 0:
            _refuse(group, config, name, "is negative", "0 or more")


def _refuse(group: str, config: object, name: str, why: str, remedy: str) -> None:
    path = f"{group}.{name}" if group else name
    raise ConfigError(f"{path}={getattr(config, name)} {why}.\n  Set it to {remedy}.")
