"""What `rrfp_jax.simulate` is asked to compare, as frozen, validated data."""

import dataclasses

from rrfp_jax.core import graph as graphs
from rrfp_jax.core import memory, placement
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.memory import Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError, check_choice
from rrfp_jax.sim import costs
from rrfp_jax.sim.costs import CostTable


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """The pipeline and the bounds on readiness-first policies.

    Attributes:
      num_ranks: pipeline ranks.
      placement: one_each, v_shaped, or interleaved:CHUNKS.
      num_microbatches: of the step.
      in_flight_limit, in_flight_taper, weight_limit, memory_limit_gb, launch_ahead: see
        `core.policies.Policy`.
      order_csvs: paths of orders to run too, as fixed orders and as hints.

    Raises:
      ConfigError: a value is unknown or below 1.
    """

    num_ranks: int
    placement: str
    num_microbatches: int
    in_flight_limit: int
    in_flight_taper: float
    weight_limit: int
    memory_limit_gb: float
    launch_ahead: int
    order_csvs: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in ("num_ranks", "num_microbatches"):
            _check_at_least(f"pipeline.{name}", getattr(self, name), 1)
        _ = self.policy  # checks its values
        self.graph()

    @property
    def policy(self) -> Policy:
        """What readiness-first policies have in common."""
        return Policy(
            in_flight_limit=self.in_flight_limit,
            in_flight_taper=self.in_flight_taper,
            weight_limit=self.weight_limit,
            memory_limit_gb=self.memory_limit_gb,
            launch_ahead=self.launch_ahead,
        )

    @property
    def num_chunks(self) -> int:
        """Stages of a rank."""
        match self.placement.split(":"):
            case ["one_each"]:
                return 1
            case ["v_shaped"]:
                return 2
            case ["interleaved", count] if count.isdecimal() and int(count) > 0:
                return int(count)
        raise ConfigError(
            f"pipeline.placement={self.placement!r} is not known.\n"
            "  Set --config.pipeline.placement to one_each, v_shaped or interleaved:2."
        )

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return self.num_ranks * self.num_chunks

    def graph(self) -> PipelineGraph:
        """Returns the chain of stages of one step."""
        if self.placement == "v_shaped":
            placed = placement.v_shaped(self.num_ranks)
        else:
            placed = placement.interleaved(self.num_ranks, self.num_chunks)
        return graphs.chain(self.num_microbatches, placed)


@dataclasses.dataclass(frozen=True)
class CostConfig:
    """Durations without any disturbance.

    Attributes:
      forward_ms: a rank's forward of one microbatch, over all its stages.
      backward_ms: likewise its backward, input and weight gradients together.
      weight_fraction: the part of that which weight gradients take.
      transfer_ms: of one payload between ranks.
      blocking: whether baselines run a second time, with links that block both ranks.
      residual_mb: MiB that a rank's forward of one microbatch keeps, over its stages.
      weight_residual: the part of that which weight gradients need.

    Raises:
      ConfigError: a value is negative, a part is more than the whole, or both
        computations take no time.
    """

    forward_ms: float
    backward_ms: float
    weight_fraction: float
    transfer_ms: float
    blocking: bool
    residual_mb: float
    weight_residual: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check_at_least(f"cost.{field.name}", getattr(self, field.name), 0)
        for name in ("weight_fraction", "weight_residual"):
            _check_at_most(f"cost.{name}", getattr(self, name), 1)
        if not self.forward_ms + self.backward_ms > 0:
            raise ConfigError(
                "cost.forward_ms and cost.backward_ms are both 0.\n"
                "  Set --config.cost.forward_ms above 0."
            )


@dataclasses.dataclass(frozen=True)
class JitterConfig:
    """Disturbances, see `sim.costs`.

    Attributes:
      level: of injected sleeps, J0 to J3.
      compute_cv: of every task.
      transfer_cv: of every transfer.
      transfer_tail: Pareto exponent of every transfer; 0 for none.
      straggler_rank: the rank that is slow throughout.
      straggler_factor: how slow; 1 for none.
      image_cv: of the factor that a microbatch has on all vision stages.
      num_vision_stages: the first stages, that feel it.

    Raises:
      ConfigError: a value is unknown or negative.
    """

    level: str
    compute_cv: float
    transfer_cv: float
    transfer_tail: float
    straggler_rank: int
    straggler_factor: float
    image_cv: float
    num_vision_stages: int

    def __post_init__(self) -> None:
        check_choice("jitter.level", self.level, costs.LEVELS)
        for field in dataclasses.fields(self):
            if field.name != "level":
                _check_at_least(f"jitter.{field.name}", getattr(self, field.name), 0)


@dataclasses.dataclass(frozen=True)
class SimConfig:
    """One comparison.

    Attributes:
      seeds: of the disturbances; one run of each policy each.
      pipeline: what runs.
      cost: how long it takes.
      jitter: how that varies.

    Raises:
      ConfigError: there is no seed, or two groups contradict.
    """

    seeds: tuple[int, ...]
    pipeline: PipelineConfig
    cost: CostConfig
    jitter: JitterConfig

    def __post_init__(self) -> None:
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ConfigError(
                f"seeds={self.seeds} is empty or repeats one.\n"
                "  Set --config.seeds to distinct ints, such as '(0, 1, 2)'."
            )
        jitter, pipeline = self.jitter, self.pipeline
        last = pipeline.num_ranks - 1
        _check_at_most("jitter.straggler_rank", jitter.straggler_rank, last)
        _check_at_most(
            "jitter.num_vision_stages", jitter.num_vision_stages, pipeline.num_stages
        )

    def draw(self, seed: int) -> CostTable:
        """Returns the durations of one step, disturbed."""
        graph, jitter = self.pipeline.graph(), self.jitter
        chunk_s = 1e-3 / self.pipeline.num_chunks
        vision = range(jitter.num_vision_stages)
        drawn = costs.constant(
            graph,
            self.cost.forward_ms * chunk_s,
            self.cost.backward_ms * chunk_s * (1 - self.cost.weight_fraction),
            self.cost.transfer_ms / 1e3,
            self.cost.backward_ms * chunk_s * self.cost.weight_fraction,
        )
        drawn = costs.with_image_load(drawn, vision, jitter.image_cv, seed)
        drawn = costs.with_lognormal(drawn, jitter.compute_cv, seed)
        drawn = costs.with_straggler(
            drawn, graph, jitter.straggler_rank, jitter.straggler_factor
        )
        drawn = costs.with_injected(drawn, costs.LEVELS[jitter.level], seed)
        drawn = costs.with_lognormal_transfers(drawn, jitter.transfer_cv, seed)
        if jitter.transfer_tail:
            tail = jitter.transfer_tail
            drawn = costs.with_heavy_tailed_transfers(drawn, tail, seed)
        return drawn

    def residuals(self, graph: PipelineGraph) -> Residuals:
        """Returns what tasks keep."""
        each = round(self.cost.residual_mb * 2**20 / self.pipeline.num_chunks)
        return memory.constant(graph, each, self.cost.weight_residual)

    def on_one_stage_a_rank(self) -> "SimConfig":
        """Returns the same with the plainest placement."""
        pipeline = dataclasses.replace(self.pipeline, placement="one_each")
        return dataclasses.replace(self, pipeline=pipeline)


def _check_at_least(path: str, value: float, least: float) -> None:
    if not value >= least:
        raise ConfigError(
            f"{path}={value} is below {least}.\n"
            f"  Set --config.{path} to {least} or more."
        )


def _check_at_most(path: str, value: float, most: float) -> None:
    if value > most:
        raise ConfigError(
            f"{path}={value} is above {most}.\n  Set --config.{path} to {most} or less."
        )
