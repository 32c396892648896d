"""Multi-head attention with rotary positions, shared key heads and segments.

Legend: B rows (texts or images), L tokens a row, D width, H query heads, K key and
value heads, G features of one head.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax.models import dense


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What one attention is made of.

    Attributes:
      width: features of the residual stream (D).
      num_heads: query heads (H).
      num_kv_heads: key and value heads (K), each shared by H / K query heads.
      head_dim: features of one head (G).
      num_residuals: residual branches in the tower; scales the output's init.
      use_bias: whether all four maps have biases.
      is_causal: a position sees only those before it and itself.
      rope_theta: base of the rotary wavelengths; None for no rotation.
      qk_norm_eps: eps of the norms of queries and keys; None for no norms.
      compute_dtype: dtype of the matrix products.
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_residuals: int
    use_bias: bool
    is_causal: bool
    rope_theta: float | None
    qk_norm_eps: float | None
    compute_dtype: str

    def flops(self, rows: int, length: int) -> float:
        """Forward FLOPs on that many rows; the square counts whole, not causal."""
        num_heads = 2 * self.num_heads + 2 * self.num_kv_heads  # q, o and k, v
        maps = 2 * self.width * num_heads * self.head_dim * length
        square = 4 * length * length * self.num_heads * self.head_dim
        return float(rows * (maps + square))


class Attention(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """Softmax attention; logits and softmax are float32."""

    def __init__(self, spec: AttentionSpec, rngs: nnx.Rngs) -> None:
        self.spec = spec
        width, bias = spec.width, spec.use_bias
        features = spec.num_heads * spec.head_dim
        kv_features = spec.num_kv_heads * spec.head_dim
        self.query = dense.column(width, features, bias, rngs)
        self.key = dense.column(width, kv_features, bias, rngs)
        self.value = dense.column(width, kv_features, bias, rngs)
        self.output = dense.row(features, width, bias, spec.num_residuals, rngs)
        if spec.qk_norm_eps is not None:
            self.query_norm = dense.rms_norm(spec.head_dim, spec.qk_norm_eps, rngs)
            self.key_norm = dense.rms_norm(spec.head_dim, spec.qk_norm_eps, rngs)

    def __call__(
        self,
        x_BLD: jax.Array,
        positions_BL: jax.Array | None,
        segment_ids_BL: jax.Array | None,
    ) -> jax.Array:
        """Mixes the tokens of each row.

        Args:
          x_BLD: in the compute dtype.
          positions_BL: read if the spec has a `rope_theta`.
          segment_ids_BL: tokens see equal ids only; None lets all see all. Padding
            (0) sees padding, so no row of the softmax is empty.

        Returns:
          (B, L, D), in the compute dtype.
        """
        spec = self.spec
        q_BLHG = self._heads(self.query(x_BLD), spec.num_heads)
        k_BLKG = self._heads(self.key(x_BLD), spec.num_kv_heads)
        v_BLKG = self._heads(self.value(x_BLD), spec.num_kv_heads)
        if spec.qk_norm_eps is not None:
            q_BLHG, k_BLKG = self.query_norm(q_BLHG), self.key_norm(k_BLKG)
        if spec.rope_theta is not None and positions_BL is not None:
            q_BLHG = rotate(q_BLHG, positions_BL, spec.rope_theta)
            k_BLKG = rotate(k_BLKG, positions_BL, spec.rope_theta)
        mask_B1LL = None
        if segment_ids_BL is not None:
            is_same_BLL = segment_ids_BL[:, :, None] == segment_ids_BL[:, None, :]
            mask_B1LL = is_same_BLL[:, None]
        mixed_BLHG = jax.nn.dot_product_attention(
            q_BLHG.astype(spec.compute_dtype),
            k_BLKG.astype(spec.compute_dtype),
            v_BLKG,
            mask=mask_B1LL,
            is_causal=spec.is_causal,
        )
        mixed: jax.Array = self.output(mixed_BLHG.reshape(*x_BLD.shape[:2], -1))
        return mixed

    def _heads(self, x: jax.Array, num_heads: int) -> jax.Array:
        return x.reshape(*x.shape[:2], num_heads, self.spec.head_dim)


def rotate(x_BLHG: jax.Array, positions_BL: jax.Array, theta: float) -> jax.Array:
    """Turns each pair (x[g], x[g + G/2]) by its position (arXiv:2104.09864 §3).

    Pair g has wavelength 2 pi theta^(2g/G): the half-split layout of the published
    Llama and Qwen weights in the Hugging Face format.

    Returns:
      (B, L, H, G), float32.
    """
    half = x_BLHG.shape[-1] // 2
    rates = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_BL1g = (positions_BL[..., None] * rates)[:, :, None]
    sin, cos = jnp.sin(angles_BL1g), jnp.cos(angles_BL1g)
    left, right = jnp.split(x_BLHG.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
