"""What a model is, as frozen, validated data.

The only home of the models' defaults and of their rules. Arrays and modules live
elsewhere.
"""

import dataclasses
import enum
from collections.abc import Mapping

from rrfp_jax import errors

_COMPUTE_DTYPES = ("float32", "bfloat16")


class LanguageKind(enum.StrEnum):
    """Families of decoder-only language models.

    LLAMA: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases
      (arXiv:2302.13971, arXiv:2305.13245); with `qk_norm` it is Qwen3-like
      (arXiv:2505.09388).
    GPT3: LayerNorm, learned positions, multi-head attention, GELU, biases
      (arXiv:2005.14165).
    """

    LLAMA = "llama"
    GPT3 = "gpt3"


@dataclasses.dataclass(frozen=True)
class LanguageConfig:
    """Describes a decoder-only language model.

    Attributes:
      vocab_size: number of token ids.
      num_layers: number of blocks.
      width: features of the residual stream.
      num_heads: query heads.
      num_kv_heads: key and value heads; equals `num_heads` for GPT-3.
      head_dim: features of one head; `num_heads * head_dim` need not be `width`.
      mlp_width: hidden features of the MLP.
      max_length: longest text a microbatch may hold, in tokens.
      kind: one of `LanguageKind`.
      qk_norm: whether queries and keys are RMS-normalised per head (llama only).
      tied: whether the head shares the embedding table.
      rope_theta: base of the rotary wavelengths (llama only).
      norm_eps: added to the variance in every norm.
      dropout: rate on the embedding and on each residual branch; 0 is none.
      compute_dtype: "float32" or "bfloat16"; parameters are always float32.

    Raises:
      ConfigError: a value is out of range, or two of them contradict.
    """

    vocab_size: int
    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_length: int
    kind: LanguageKind = LanguageKind.LLAMA
    qk_norm: bool = False
    tied: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        check = _Checker("language", vars(self))
        check.choice("kind", tuple(LanguageKind))
        check.positive("vocab_size", "num_layers", "width", "num_heads")
        check.positive("num_kv_heads", "head_dim", "mlp_width", "max_length")
        check.positive("rope_theta", "norm_eps")
        check.trainable()
        check.divides("num_kv_heads", "num_heads")
        match self.kind:
            case LanguageKind.LLAMA:
                if self.head_dim % 2:
                    check.fail(
                        "head_dim", "is odd; rotary positions turn pairs", "even"
                    )
            case LanguageKind.GPT3:
                self._check_gpt3(check)

    def _check_gpt3(self, check: "_Checker") -> None:
        if self.num_kv_heads != self.num_heads:
            why = f"differs from num_heads={self.num_heads}; gpt3 shares no key heads"
            check.fail("num_kv_heads", why, f"{self.num_heads}")
        if self.qk_norm:
            check.fail("qk_norm", "is for kind=llama only", "False")


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """Describes a vision transformer (arXiv:2010.11929) that feeds a language model.

    Attributes:
      image_size: (height, width) in pixels; both are multiples of `patch_size`.
      channels: channels of one pixel.
      patch_size: side of a square patch, in pixels.
      width: features of the residual stream; a multiple of `num_heads`.
      num_layers: number of blocks.
      num_heads: attention heads.
      mlp_width: hidden features of the MLP.
      dropout: rate on the patch embedding and on each residual branch; 0 is none.
      compute_dtype: "float32" or "bfloat16"; parameters are always float32.

    Raises:
      ConfigError: a value is out of range, or two of them contradict.
    """

    image_size: tuple[int, int]
    channels: int
    patch_size: int
    width: int
    num_layers: int
    num_heads: int
    mlp_width: int
    dropout: float = 0.0
    compute_dtype: str = "float32"

    def __post_init__(self) -> None:
        check = _Checker("vision", vars(self))
        check.positive("channels", "patch_size", "width", "num_layers")
        check.positive("num_heads", "mlp_width")
        check.trainable()
        check.divides("num_heads", "width")
        if len(self.image_size) != 2 or any(
            side < 1 or side % self.patch_size for side in self.image_size
        ):
            why = f"is not two positive multiples of patch_size={self.patch_size}"
            check.fail("image_size", why, "(height, width) in whole patches")

    @property
    def tokens_per_image(self) -> int:
        """Number of patches of one image: T in the shape suffixes."""
        height, width = self.image_size
        return (height // self.patch_size) * (width // self.patch_size)


@dataclasses.dataclass(frozen=True)
class _Checker:
    """Words the errors of one config group, with the flag that mends each."""

    group: str
    values: Mapping[str, object]

    def fail(self, field: str, why: str, remedy: str) -> None:
        raise errors.ConfigError(
            f"model.{self.group}.{field}={self.values[field]!r} {why}.\n"
            f"  Set --config.model.{self.group}.{field} to {remedy}."
        )

    def positive(self, *fields: str) -> None:
        for field in fields:
            if not self.values[field] > 0:  # type: ignore[operator]
                self.fail(field, "is not positive", "at least 1 (or above 0)")

    def choice(self, field: str, choices: tuple[str, ...]) -> None:
        if self.values[field] not in choices:
            known = ", ".join(map(repr, map(str, choices)))
            self.fail(field, "is unknown", f"one of {known}")

    def trainable(self) -> None:
        self.choice("compute_dtype", _COMPUTE_DTYPES)
        if not 0 <= self.values["dropout"] < 1:  # type: ignore[operator]
            self.fail("dropout", "is not a rate", "0 <= rate < 1")

    def divides(self, part: str, whole: str) -> None:
        total = self.values[whole]
        if total % self.values[part]:  # type: ignore[operator]
            self.fail(part, f"does not divide {whole}={total}", f"a divisor of {total}")
