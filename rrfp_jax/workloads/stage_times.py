"""From a workload's dimensions to the durations of a step.

The model is the project's own: layers and their FLOPs come from `rrfp_jax.models`, and
the stages are cut as the trainer cuts them, each tower into even contiguous parts.

* Compute: FLOPs over what a GPU reaches, divided by the tensor-parallel ways, or what
  it takes to launch a layer's kernels if that is more. The attention square counts
  half in the language model, which is causal. B and W each cost what F costs: the same
  matrix products, once for the inputs and once for the weights.
* Tensor parallelism: two all-reduces of the residual stream a block in F and two in B
  (arXiv:1909.08053 §3), on the critical path.
* Transfers: the residual stream in 16 bits.
* Images: a microbatch is one sample. With x times the mean number of images it is x
  times the work and the payloads of the vision tower; the language model's row is
  padded.
* Residuals: (10 + 24/t) bytes a token and feature of a block (arXiv:2205.05198 §4.1,
  without the attention square), of which W needs 32/34.
"""

import dataclasses
import functools
from collections.abc import Sequence

from rrfp_jax.core import memory
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.models import cut, model
from rrfp_jax.models.layer import Layer, Shape
from rrfp_jax.sim import costs
from rrfp_jax.sim.costs import CostTable
from rrfp_jax.workloads.config import WorkloadConfig

_BYTES = 2  # of a number on a link
_POOLED = 1 / 4  # places in a row that an image's patches take, as in InternVL, Qwen-VL
_WEIGHT_RESIDUAL = 32 / 34  # of a block's residuals, that its W needs


@dataclasses.dataclass(frozen=True)
class StageTimes:
    """What each stage takes on one microbatch, without any disturbance.

    Attributes:
      forward_s, backward_s, weight_s: seconds of F, B and W, by stage.
      transfer_s: seconds from each stage to the next, and back.
      residual_bytes: that F keeps on each device, by stage.
      num_vision: the first stages, which are the vision tower's.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    residual_bytes: tuple[int, ...]
    num_vision: int

    @property
    def mean_s(self) -> float:
        """Of all tasks of a microbatch."""
        all_s = sum(self.forward_s) + sum(self.backward_s) + sum(self.weight_s)
        return all_s / (3 * len(self.forward_s))


@dataclasses.dataclass(frozen=True)
class Workload:
    """Draws the steps of a workload.

    Attributes:
      config: what it is.
      tensor: tensor-parallel ways.
      scale: of all durations.
      level: of injected sleeps; see `sim.costs.LEVELS`.
      straggler: a rank and how much slower it is throughout; None for none.
    """

    config: WorkloadConfig
    tensor: int = 1
    scale: float = 1.0
    level: str = "J0"
    straggler: tuple[int, float] | None = None

    def times(self, num_stages: int) -> StageTimes:
        """Returns the undisturbed times of so many stages, not scaled.

        Raises:
          ConfigError: the model has fewer layers.
        """
        return _stage_times(self.config, self.tensor, num_stages)

    def draw(self, graph: PipelineGraph, seed: int) -> CostTable:
        """Returns the durations of one step.

        Args:
          graph: a chain of the model's stages.
          seed: of everything that varies.
        """
        times, varies = self.times(graph.num_stages), self.config.variation
        table = costs.constant(
            graph, times.forward_s, times.backward_s, 0.0, times.weight_s
        )
        loads = costs.image_loads(graph.num_microbatches, varies.image_cv, seed)
        table = _loaded(table, times, loads)
        table = costs.with_lognormal(table, varies.compute_cv, seed)
        if self.straggler is not None:
            table = costs.with_straggler(table, graph, *self.straggler)
        table = costs.with_injected(table, costs.LEVELS[self.level], seed)
        table = costs.with_lognormal_transfers(table, varies.transfer_cv, seed)
        return costs.scaled(table, self.scale)

    def residuals(self, graph: PipelineGraph) -> Residuals:
        """Returns what tasks keep on each device, at the mean number of images."""
        kept = self.times(graph.num_stages).residual_bytes
        later = _WEIGHT_RESIDUAL if graph.is_split else 0.0
        return memory.tabulate(graph, lambda _, s: (kept[s], round(kept[s] * later)))


def _loaded(table: CostTable, times: StageTimes, images: Sequence[float]) -> CostTable:
    """Returns the table with transfers, and all of it by each microbatch's images."""
    padded = [1.0] * len(images)

    def loads(stage: int) -> Sequence[float]:
        return images if stage < times.num_vision else padded

    return CostTable(
        {
            (kind, stage): costs.loaded(each, loads(stage))
            for (kind, stage), each in table.compute.items()
        },
        {
            (kind, u, v): costs.loaded(
                (times.transfer_s[min(u, v)],) * len(images), loads(min(u, v))
            )
            for kind, u, v in table.transfer
        },
    )


@functools.lru_cache
def _stage_times(config: WorkloadConfig, tensor: int, num_stages: int) -> StageTimes:
    dimensions, machine = config.model, config.machine
    built = model.build(dimensions.language, dimensions.vision)
    towers = [
        [_cost(config, tower.name, layer, tensor) for layer in tower.layers]
        for tower in built.towers
    ]
    shares = cut.apportion([[c.total_s for c in tower] for tower in towers], num_stages)
    stages: list[_Cost] = []
    for tower, share in zip(towers, shares, strict=True):
        counts = cut.balanced([c.total_s for c in tower], share)
        stages += [_sum(part) for part in cut.by_counts(tower, counts)]
    num_vision = shares[0] if dimensions.vision is not None else 0
    rate = machine.link_gb_per_s * 1e9
    return StageTimes(
        forward_s=tuple(c.compute_s + c.reduce_s for c in stages),
        backward_s=tuple(c.compute_s + c.reduce_s for c in stages),
        weight_s=tuple(c.compute_s for c in stages),
        transfer_s=tuple(machine.link_ms / 1e3 + c.out_bytes / rate for c in stages),
        residual_bytes=tuple(c.residual_bytes for c in stages),
        num_vision=num_vision,
    )


@dataclasses.dataclass(frozen=True)
class _Cost:
    """Of a layer or a stage, on one microbatch."""

    compute_s: float  # of its F
    reduce_s: float  # of the all-reduces in it
    residual_bytes: int
    out_bytes: float  # of what it hands on

    @property
    def total_s(self) -> float:
        return 3 * self.compute_s + 2 * self.reduce_s


def _sum(parts: Sequence[_Cost]) -> _Cost:
    return _Cost(
        sum(c.compute_s for c in parts),
        sum(c.reduce_s for c in parts),
        sum(c.residual_bytes for c in parts),
        parts[-1].out_bytes,
    )


def _cost(config: WorkloadConfig, tower: str, layer: Layer, tensor: int) -> _Cost:
    dimensions, machine = config.model, config.machine
    stream = _stream(config, tower)
    is_block = "/block_" in layer.name
    payload = _BYTES * stream
    reduced = 2 * payload if is_block and tensor > 1 else 0
    flops = layer.flops(Shape(1, dimensions.tokens, 1))
    if tower == "vision":
        flops *= dimensions.images
    elif is_block:
        spec = dimensions.language
        flops -= 2 * dimensions.tokens**2 * spec.num_heads * spec.head_dim  # causal
    out = payload
    if layer.name == "projector":
        out = _BYTES * _POOLED * _image_tokens(config) * dimensions.language.width
    computed_s = flops / (machine.tflops * 1e12 * tensor)
    return _Cost(
        compute_s=max(computed_s, machine.layer_ms / 1e3 if flops else 0.0),
        reduce_s=reduced / (machine.tensor_gb_per_s * 1e9),
        residual_bytes=round((10 + 24 / tensor) * stream) if is_block else 0,
        out_bytes=out,
    )


def _stream(config: WorkloadConfig, tower: str) -> float:
    """Returns the numbers of the residual stream of a microbatch."""
    dimensions = config.model
    if tower == "vision" and dimensions.vision is not None:
        return _image_tokens(config) * dimensions.vision.width
    return dimensions.tokens * dimensions.language.width


def _image_tokens(config: WorkloadConfig) -> float:
    vision = config.model.vision
    return 0.0 if vision is None else config.model.images * vision.tokens_per_image
