"""What the programs of a pipeline cost, and what the ranks would hold.

The figures are XLA's own, of the executables that training runs. On a rank of several
devices they are those of each device. XLA counts the body of a loop (`lax.scan`) once,
however often it runs, and cannot look into kernels that are not its own.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rrfp_jax.core import memory, policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import compiler
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.runtime.stage import Tree


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """XLA's figures of one executable.

    Attributes:
      flops: all arithmetic, not only matrix products.
      bytes_accessed: read and written, as XLA estimates it.
      argument_bytes: of its arguments.
      output_bytes: of its results.
      alias_bytes: of results that lie where a donated argument was.
      temp_bytes: what it allocates while it runs.
    """

    flops: float
    bytes_accessed: float
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def allocated_bytes(self) -> int:
        """What a run adds to its arguments: temporary, and new results."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes


@dataclasses.dataclass(frozen=True)
class StageCost:
    """One stage, for one kind of microbatch.

    Attributes:
      rank: where it lies.
      num_params: trained or not; the copies of a tied one count in each stage.
      forward: F; None where the microbatch skips the stage.
      backward: B of the split backward; the only backward of a stage without W, and
        None where nothing is trained here or upstream.
      weight: W; None where nothing is trained here.
      whole: the backward in one program.
      saved_bytes: residuals from F to B.
      kept_bytes: residuals from B to W.
    """

    rank: int
    num_params: int
    forward: ProgramCost | None
    backward: ProgramCost | None
    weight: ProgramCost | None
    whole: ProgramCost | None
    saved_bytes: int
    kept_bytes: int

    @property
    def flops(self) -> float:
        """Of F, B and W together."""
        ran = (self.forward, self.backward, self.weight)
        return sum(program.flops for program in ran if program)

    @property
    def split_ratio(self) -> float | None:
        """FLOPs of B and W over those of the whole; None where there is no W."""
        if not (self.backward and self.weight and self.whole and self.whole.flops):
            return None
        return (self.backward.flops + self.weight.flops) / self.whole.flops


@dataclasses.dataclass(frozen=True)
class RankBytes:
    """Residual bytes of a rank in a step of equal microbatches.

    Split or whole, the backward is here as the policy has it.

    Attributes:
      one: the most of one microbatch, which any limit must hold.
      fixed_1f1b: the peak of that order; None where the pipeline has none.
      at_limit: with as many microbatches as may be in flight, each with its most. Only
        `back_pressure=one_by_one`, which may overshoot, can need more.
    """

    one: int
    fixed_1f1b: int | None
    at_limit: int


@dataclasses.dataclass(frozen=True)
class KindCost:
    """A pipeline, for one kind of microbatch.

    Attributes:
      stages: of the pipeline.
      ranks: of the pipeline.
      smallest_limit: the least bytes on a rank with which a step can finish.
    """

    stages: tuple[StageCost, ...]
    ranks: tuple[RankBytes, ...]
    smallest_limit: int

    @property
    def flops(self) -> float:
        """Of all tasks of the microbatch."""
        return sum(stage.flops for stage in self.stages)

    @property
    def imbalance(self) -> float:
        """FLOPs of the largest stage over the mean of those that are visited."""
        visited = [stage.flops for stage in self.stages if stage.forward]
        return max(visited) * len(visited) / max(sum(visited), 1.0)


def figures(
    pipeline: Pipeline, examples: Sequence[Tree], num_microbatches: int
) -> list[KindCost]:
    """Returns what each kind of microbatch costs; compiles what is not compiled.

    Args:
      pipeline: it.
      examples: a microbatch of each kind; `jax.ShapeDtypeStruct`s will do.
      num_microbatches: of a step.
    """
    graph, split = pipeline.programs(examples, is_split=True)
    _, whole = pipeline.programs(examples, is_split=False)
    sizes = [
        sum(aval.size for aval in layout.avals)
        for layout in pipeline.parameters.layouts
    ]
    found = []
    for pair in zip(split, whole, strict=True):
        stages = tuple(
            _stage(rank, size, in_two, in_one)
            for rank, size, in_two, in_one in zip(
                graph.placement, sizes, *pair, strict=True
            )
        )
        skipped = {s for s, plan in enumerate(pair[0]) if plan is None}
        step = pipeline.graph([skipped] * num_microbatches)
        plan = pair[0] if step.is_split else pair[1]
        residuals = compiler.residuals(step, [plan] * num_microbatches)
        smallest, _ = memory.smallest_limit(step, residuals)
        ranks = _ranks(step, residuals, pipeline.policy)
        found.append(KindCost(stages, ranks, smallest))
    return found


def _stage(rank: int, size: int, split: Any, whole: Any) -> StageCost:
    if split is None:
        return StageCost(rank, size, None, None, None, None, 0, 0)
    return StageCost(
        rank,
        size,
        _program(split.forward),
        _program(split.backward),
        _program(split.weight),
        _program(whole.backward),
        split.saved.num_bytes,
        split.kept.num_bytes,
    )


def _program(compiled: Any) -> ProgramCost | None:
    if compiled is None:
        return None
    counted, sizes = compiled.cost_analysis(), compiled.memory_analysis()
    return ProgramCost(
        counted.get("flops", 0.0),  # absent where there is no arithmetic
        counted.get("bytes accessed", 0.0),
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
    )


def _ranks(
    step: PipelineGraph, residuals: Residuals, policy: policies.Policy
) -> tuple[RankBytes, ...]:
    one = [residuals.most_of(stages, 0) for stages in step.stages_of]
    peaks = _peaks_of_1f1b(step, residuals, policy)
    count = min(step.num_microbatches, policy.in_flight_limit)
    pairs = zip(one, peaks, strict=True)
    return tuple(RankBytes(most, peak, most * count) for most, peak in pairs)


def _peaks_of_1f1b(
    step: PipelineGraph, residuals: Residuals, policy: policies.Policy
) -> list[int | None]:
    one_f_one_b = dataclasses.replace(policy, hint="1f1b")
    try:
        orders = policies.fixed_orders(step, one_f_one_b)
    except ConfigError:  # it is not defined for the placement, or for so many
        return [None] * step.num_ranks
    return [residuals.peak(order) for order in orders]
