"""The pre-norm transformer block that every tower is made of, and its two MLPs.

x + attention(norm(x)), then x + mlp(norm(x)). One frozen spec says which norm,
which attention and which MLP; `language` and `vision` write the specs.

Legend: B rows (texts or images), L tokens a row, D width, F hidden features.
"""

import dataclasses

import jax
from flax import nnx

from rrfp_jax.models import attention, dense, layer


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """What one block is made of.

    Attributes:
      attention: its attention; also says width, biases and dtype for the rest.
      mlp_width: hidden features of the MLP.
      is_gated: SwiGLU if true, else GELU.
      is_rms: RMSNorm if true, else LayerNorm.
      norm_eps: added to the variance in both norms.
      dropout: rate on each of the two residual branches.
    """

    attention: attention.AttentionSpec
    mlp_width: int
    is_gated: bool
    is_rms: bool
    norm_eps: float
    dropout: float

    @property
    def feed_keys(self) -> frozenset[str]:
        """What the block may read from the feed."""
        reads = {
            "segment_ids_BL": self.attention.is_causal,
            "positions_BL": self.attention.rope_theta is not None,
            "dropout_key": self.dropout > 0,
        }
        return frozenset(key for key, is_read in reads.items() if is_read)

    def flops(self, rows: int, length: int) -> float:
        """Forward FLOPs on that many rows of that many tokens."""
        num_maps = 3 if self.is_gated else 2
        mlp = 2 * rows * length * num_maps * self.attention.width * self.mlp_width
        return self.attention.flops(rows, length) + mlp


class Block(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """Attention and MLP, each on a residual branch; the carry is x_BLD."""

    def __init__(self, spec: BlockSpec, rngs: nnx.Rngs) -> None:
        self.spec = spec
        norm = dense.rms_norm if spec.is_rms else dense.layer_norm
        mlp = SwiGLU if spec.is_gated else GeluMLP
        width = spec.attention.width
        self.attention_norm = norm(width, spec.norm_eps, rngs)
        self.attention = attention.Attention(spec.attention, rngs)
        self.mlp_norm = norm(width, spec.norm_eps, rngs)
        self.mlp = mlp(spec, rngs)
        self.dropout = nnx.Dropout(spec.dropout)

    def __call__(
        self, x_BLD: jax.Array, feed: layer.Feed, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Returns the next carry, in the compute dtype."""
        keys = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        spec = self.spec.attention
        h_BLD = self.attention(
            self.attention_norm(x_BLD).astype(spec.compute_dtype),
            feed["positions_BL"] if spec.rope_theta is not None else None,
            feed["segment_ids_BL"] if spec.is_causal else None,
        )
        x_BLD = x_BLD + self._drop(h_BLD, keys[0])
        h_BLD = self.mlp(self.mlp_norm(x_BLD).astype(spec.compute_dtype))
        return x_BLD + self._drop(h_BLD, keys[1])

    def _drop(self, h_BLD: jax.Array, key: jax.Array | None) -> jax.Array:
        dropped: jax.Array = self.dropout(h_BLD, deterministic=key is None, rngs=key)
        return dropped


class SwiGLU(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202)."""

    def __init__(self, spec: BlockSpec, rngs: nnx.Rngs) -> None:
        width, bias = spec.attention.width, spec.attention.use_bias
        num_residuals = spec.attention.num_residuals
        self.gate = dense.column(width, spec.mlp_width, bias, rngs)
        self.up = dense.column(width, spec.mlp_width, bias, rngs)
        self.down = dense.row(spec.mlp_width, width, bias, num_residuals, rngs)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Maps each token on its own."""
        h_BLF = jax.nn.silu(self.gate(x_BLD)) * self.up(x_BLD)
        y_BLD: jax.Array = self.down(h_BLF)
        return y_BLD


class GeluMLP(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """fc2(gelu(fc1(x))), GELU in its tanh form (arXiv:1606.08415)."""

    def __init__(self, spec: BlockSpec, rngs: nnx.Rngs) -> None:
        width, bias = spec.attention.width, spec.attention.use_bias
        num_residuals = spec.attention.num_residuals
        self.fc1 = dense.column(width, spec.mlp_width, bias, rngs)
        self.fc2 = dense.row(spec.mlp_width, width, bias, num_residuals, rngs)

    def __call__(self, x_BLD: jax.Array) -> jax.Array:
        """Maps each token on its own."""
        y_BLD: jax.Array = self.fc2(jax.nn.gelu(self.fc1(x_BLD), approximate=True))
        return y_BLD
