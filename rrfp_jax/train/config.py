"""The whole description of a training run, as frozen, validated data.

The only home of the trainer's defaults. Each group checks itself; `TrainConfig` checks
what concerns several groups.
"""

import dataclasses
import math
from collections.abc import Sequence

from rrfp_jax.core import placement as placement_lib
from rrfp_jax.core import policies
from rrfp_jax.data.config import DataConfig, check_num_microbatches
from rrfp_jax.errors import ConfigError, check_at_least, check_choice
from rrfp_jax.models.config import LanguageConfig, VisionConfig
from rrfp_jax.train.machine_config import ClusterConfig, MeshConfig

PLACEMENTS = ("one_each", "interleaved", "v_shaped", "colocated")
BALANCES = ("flops", "measured")
RECOMPUTE = ("none", "dots", "stage")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which model.

    Attributes:
      language: the language model.
      vision: the vision tower in front of it; None for text only.
      recompute: what the backward computes again instead of keeping it: nothing,
        everything but matrix products, or the whole stage.
      frozen: layer names, or their beginnings, that are not trained.
    """

    language: LanguageConfig
    vision: VisionConfig | None = None
    recompute: str = "none"
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choice("model.recompute", self.recompute, RECOMPUTE)


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """How the model is cut, where it lies, and what each rank runs next.

    Attributes:
      num_ranks: pipeline ranks.
      num_microbatches: of one step.
      placement: `one_each`; `interleaved` with `num_chunks` stages a rank, round-robin;
        `v_shaped`, with two; or `colocated`, where each tower is cut for all ranks, so
        that the vision encoder's stages are extra chunks of the language model's ranks.
      num_chunks: stages a rank, for `interleaved`.
      layer_counts: layers of each stage, tower after tower; empty to balance them.
      balance: what to make even where `layer_counts` is empty: `flops` as counted, or
        times as `measured` on this machine when the run starts.
      hint and what follows: see `core.policies.Policy`.
    """

    num_ranks: int
    num_microbatches: int
    placement: str = "one_each"
    num_chunks: int = 1
    layer_counts: tuple[int, ...] = ()
    balance: str = "flops"
    hint: str = policies.Policy.hint
    order: str = policies.Policy.order
    in_flight_limit: int = policies.Policy.in_flight_limit
    in_flight_taper: float = policies.Policy.in_flight_taper
    weight_limit: int = policies.Policy.weight_limit
    memory_limit_gb: float = policies.Policy.memory_limit_gb
    back_pressure: str = policies.Policy.back_pressure
    split: str = policies.Policy.split
    deterministic: bool = policies.Policy.deterministic
    warmup_factor: float = policies.Policy.warmup_factor
    microbatch_group: int = policies.Policy.microbatch_group
    launch_ahead: int = policies.Policy.launch_ahead
    agreement: str = policies.Policy.agreement

    def __post_init__(self) -> None:
        check_at_least("pipeline", self, num_ranks=1, num_microbatches=1, num_chunks=1)
        check_choice("pipeline.placement", self.placement, PLACEMENTS)
        check_choice("pipeline.balance", self.balance, BALANCES)
        if self.num_chunks > 1 and self.placement != "interleaved":
            raise ConfigError(
                f"pipeline.num_chunks={self.num_chunks} is for interleaved placement; "
                f"it is {self.placement}.\n"
                "  Set --config.pipeline.placement to interleaved, or num_chunks to 1."
            )
        count = self.num_stages
        if self.layer_counts and count and len(self.layer_counts) != count:
            raise ConfigError(
                f"pipeline.layer_counts={self.layer_counts} cuts "
                f"{len(self.layer_counts)} stages; {self.num_ranks} ranks hold "
                f"{count}.\n  Give {count} counts to "
                "--config.pipeline.layer_counts, or none to balance by FLOPs."
            )
        _ = self.policy  # checks its values

    def stage_ranks(self, tower_lengths: Sequence[int]) -> placement_lib.Placement:
        """Returns the rank of each stage, given how many stages each tower has."""
        match self.placement:
            case "interleaved":
                return placement_lib.interleaved(self.num_ranks, self.num_chunks)
            case "v_shaped":
                return placement_lib.v_shaped(self.num_ranks)
            case "colocated":
                return placement_lib.colocated(*tower_lengths)
            case _:
                return placement_lib.one_each(self.num_ranks)

    @property
    def num_stages(self) -> int | None:
        """Stages on all ranks together; None where it depends on the model."""
        return None if self.placement == "colocated" else len(self.stage_ranks(()))

    @property
    def policy(self) -> policies.Policy:
        """How the ranks choose."""
        names = [field.name for field in dataclasses.fields(policies.Policy)]
        return policies.Policy(**{name: getattr(self, name) for name in names})


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (arXiv:1711.05101) with linear warm-up and cosine decay.

    Attributes:
      learning_rate: at the end of the warm-up.
      warmup_steps: from 0 to the full rate.
      final_fraction: of the rate, at the last step.
      b1, b2, eps: of Adam.
      weight_decay: on matrices; vectors (norms, biases) are not decayed.
      clip_norm: largest norm of the gradient over all stages.
      shard_state: whether each data-parallel replica keeps only its part of the moments
        and updates only that (ZeRO-1).
    """

    learning_rate: float
    warmup_steps: int = 0
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    shard_state: bool = False

    def __post_init__(self) -> None:
        check_at_least("optimizer", self, warmup_steps=0, weight_decay=0)
        for name in ("learning_rate", "clip_norm", "eps"):
            if not getattr(self, name) > 0 or not math.isfinite(getattr(self, name)):
                raise ConfigError(
                    f"optimizer.{name}={getattr(self, name)} is not a positive number."
                    f"\n  Set --config.optimizer.{name} above 0."
                )
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"optimizer.{name}={getattr(self, name)} is no decay rate.\n"
                    f"  Set --config.optimizer.{name} to 0 or more and below 1."
                )
        if not 0 <= self.final_fraction <= 1:
            raise ConfigError(
                f"optimizer.final_fraction={self.final_fraction} is no fraction.\n"
                "  Set --config.optimizer.final_fraction between 0 and 1."
            )


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """How long to train, and what to write when.

    Attributes:
      num_steps: optimizer updates.
      seed: of the parameters and of dropout.
      log_every: steps between lines in `metrics.jsonl`.
      eval_every: steps between evaluations; 0 for only the last step.
      eval_batches: batches of an evaluation; 0 for all held-out samples.
      checkpoint_every: steps between checkpoints; the last step has one always.
      keep_checkpoints: how many of them are kept.
      trace_step: the step whose timeline is written; 0 for none.
      num_traced: steps from that on whose traces are written, for `rrfp_jax.advise`.
    """

    num_steps: int
    seed: int = 0
    log_every: int = 1
    eval_every: int = 0
    eval_batches: int = 0
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    trace_step: int = 0
    num_traced: int = 8

    def __post_init__(self) -> None:
        check_at_least("train", self, num_steps=1, seed=0, log_every=1, eval_every=0)
        check_at_least(
            "train",
            self,
            checkpoint_every=1,
            keep_checkpoints=1,
            trace_step=0,
            num_traced=1,
            eval_batches=0,
        )
        if self.trace_step > self.num_steps:
            raise ConfigError(
                f"train.trace_step={self.trace_step} comes after the last of "
                f"train.num_steps={self.num_steps}.\n"
                "  Set --config.train.trace_step to one of them, or 0 for none."
            )


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All of a run.

    Raises:
      ConfigError: a value, or two together, make no run.
    """

    model: ModelConfig
    data: DataConfig
    pipeline: PipelineConfig
    optimizer: OptimizerConfig
    train: RunConfig
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    cluster: ClusterConfig = dataclasses.field(default_factory=ClusterConfig)

    @property
    def num_microbatches(self) -> int:
        """Of one step, in all replicas together."""
        return self.pipeline.num_microbatches * self.mesh.replicas

    def __post_init__(self) -> None:
        count = self.num_microbatches
        check_num_microbatches(
            self.data.batch_size, self.pipeline.num_microbatches, self.mesh.replicas
        )
        rows = self.data.batch_size // count
        if rows % self.mesh.data:
            raise ConfigError(
                f"mesh.data={self.mesh.data} does not divide the {rows} rows of a "
                f"microbatch (data.batch_size={self.data.batch_size} / "
                f"{count} microbatches, of all replicas).\n"
                "  Set --config.mesh.data to a divisor of that."
            )
        longest = max(self.data.length_buckets)
        if longest > self.model.language.max_length:
            raise ConfigError(
                f"data.length_buckets goes up to {longest}, more than "
                f"model.language.max_length={self.model.language.max_length}.\n"
                f"  Set --config.model.language.max_length to {longest} or more."
            )
        self._check_vision()
        if self.mesh.vision_model and self.pipeline.balance == "measured":
            raise ConfigError(
                f"mesh.vision_model={self.mesh.vision_model} and pipeline.balance="
                "measured: which ranks are the tower's is known only once measured.\n"
                "  Set --config.pipeline.balance=flops."
            )
        if self.optimizer.warmup_steps >= self.train.num_steps:
            raise ConfigError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} leaves no step "
                f"of train.num_steps={self.train.num_steps}.\n"
                "  Lower --config.optimizer.warmup_steps."
            )

    def _check_vision(self) -> None:
        vision = self.model.vision
        if vision is None:
            if self.data.image_buckets[-1]:
                raise ConfigError(
                    f"data.image_buckets={self.data.image_buckets} has images, but "
                    "model.vision=None has no tower for them.\n"
                    "  Configure model.vision, or set --config.data.image_buckets=(0,)."
                )
            return
        for name in ("image_size", "channels", "patch_size"):
            of_model, of_data = getattr(vision, name), getattr(self.data, name)
            if of_model != of_data:
                raise ConfigError(
                    f"model.vision.{name}={of_model} but data.{name}={of_data}.\n"
                    f"  Set --config.model.vision.{name} to {of_data}."
                )
