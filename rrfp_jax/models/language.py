"""The language tower: embedding with image splice, blocks, head with the loss.

Legend: B rows, L text tokens, E width, V vocabulary, N images, T tokens an image.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from rrfp_jax import errors
from rrfp_jax.models import attention, block, blueprint, config, dense, layer, partition


def blueprints(
    spec: config.LanguageConfig, has_images: bool
) -> list[tuple[str, blueprint.Blueprint]]:
    """Returns (global layer name, blueprint) from the first layer to the last.

    Args:
      spec: the language model.
      has_images: whether a vision tower may feed the embedding.
    """
    embed = blueprint.draw(
        lambda rngs: Embed(spec, rngs),
        compute_dtype=spec.compute_dtype,
        feed_keys=_embed_keys(spec, has_images),
        flops=lambda shape: 0.0,
    )
    body_spec = block_spec(spec)
    body = blueprint.draw(
        lambda rngs: block.Block(body_spec, rngs),
        compute_dtype=spec.compute_dtype,
        feed_keys=body_spec.feed_keys,
        flops=lambda shape: body_spec.flops(shape.rows, shape.length),
    )
    logit_flops = 2.0 * spec.width * spec.vocab_size
    head = blueprint.draw(
        lambda rngs: Head(spec, rngs),
        compute_dtype=spec.compute_dtype,
        feed_keys=frozenset({"labels_BL", "mask_BL"}),
        flops=lambda shape: shape.rows * shape.length * logit_flops,
    )
    blocks = [(f"language/block_{i:02d}", body) for i in range(spec.num_layers)]
    return [("language/embed", embed), *blocks, ("language/head", head)]


def block_spec(spec: config.LanguageConfig) -> block.BlockSpec:
    """Translates the kind of language model into the parts of its blocks."""
    is_llama = spec.kind == config.LanguageKind.LLAMA
    return block.BlockSpec(
        attention=attention.AttentionSpec(
            width=spec.width,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            num_residuals=2 * spec.num_layers,
            use_bias=not is_llama,
            is_causal=True,
            rope_theta=spec.rope_theta if is_llama else None,
            qk_norm_eps=spec.norm_eps if spec.qk_norm else None,
            compute_dtype=spec.compute_dtype,
        ),
        mlp_width=spec.mlp_width,
        is_gated=is_llama,
        is_rms=is_llama,
        norm_eps=spec.norm_eps,
        dropout=spec.dropout,
    )


class Embed(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """Looks tokens up and puts image tokens in their places.

    An id outside its table gives NaN, never a neighbour's row.
    """

    def __init__(self, spec: config.LanguageConfig, rngs: nnx.Rngs) -> None:
        self.spec = spec
        shape = spec.vocab_size, spec.width
        self.embedding = dense.table(*shape, partition.ROWS, rngs)
        self.has_positions = spec.kind == config.LanguageKind.GPT3
        if self.has_positions:
            shape = spec.max_length, spec.width
            self.positions = dense.table(*shape, partition.REPLICATED, rngs)
        self.dropout = nnx.Dropout(spec.dropout)

    def __call__(
        self,
        y_NTE: jax.Array | None,
        feed: layer.Feed,
        dropout_key: jax.Array | None,
    ) -> jax.Array:
        """Returns h_BLE in the compute dtype; y_NTE of None means no images.

        Raises:
          ConfigError: the rows are longer than the model allows.
        """
        tokens_BL = feed["tokens_BL"]
        _check_length(tokens_BL.shape[1], self.spec.max_length)
        h_BLE = _look_up(self.embedding[...], tokens_BL)
        if y_NTE is not None:
            index_BL1 = feed["image_index_BL"][..., None]
            image_ME = y_NTE.reshape(-1, y_NTE.shape[-1]).astype(h_BLE.dtype)
            image_BLE = _look_up(image_ME, jnp.maximum(index_BL1[..., 0], 0))
            h_BLE = jnp.where(index_BL1 >= 0, image_BLE, h_BLE)
        if self.has_positions:
            h_BLE += _look_up(self.positions[...], feed["positions_BL"])
        dropped_BLE: jax.Array = self.dropout(
            h_BLE, deterministic=dropout_key is None, rngs=dropout_key
        )
        return dropped_BLE


class Head(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """Final norm, vocabulary logits, summed cross entropy and counts.

    A tied head holds a copy of the embedding table (V, E); an untied one has a
    kernel (E, V).
    """

    def __init__(self, spec: config.LanguageConfig, rngs: nnx.Rngs) -> None:
        self.spec = spec
        is_llama = spec.kind == config.LanguageKind.LLAMA
        norm = dense.rms_norm if is_llama else dense.layer_norm
        self.norm = norm(spec.width, spec.norm_eps, rngs)
        if spec.tied:
            shape = spec.vocab_size, spec.width
            self.embedding = dense.table(*shape, partition.ROWS, rngs)
        else:
            shape = spec.width, spec.vocab_size
            self.kernel = dense.table(*shape, partition.COLUMNS, rngs)

    def __call__(
        self, h_BLE: jax.Array, feed: layer.Feed, dropout_key: jax.Array | None
    ) -> dict[str, jax.Array]:
        """Returns the sums of `score`; logits are float32."""
        del dropout_key
        h_BLE = self.norm(h_BLE).astype(self.spec.compute_dtype)
        equation = "ble,ve->blv" if self.spec.tied else "ble,ev->blv"
        weights = self.embedding[...] if self.spec.tied else self.kernel[...]
        logits_BLV = jnp.einsum(
            equation, h_BLE, weights, preferred_element_type=jnp.float32
        )
        return score(logits_BLV, feed["labels_BL"], feed["mask_BL"])


def score(
    logits_BLV: jax.Array, labels_BL: jax.Array, mask_BL: jax.Array
) -> dict[str, jax.Array]:
    """Sums what a step's loss and accuracies are made of; nothing is a mean.

    Args:
      logits_BLV: float32.
      labels_BL: the target of each position; any value where the mask is 0.
      mask_BL: 1 where a position counts, else 0.

    Returns:
      float32 scalars. "loss": sum of mask * cross entropy, in nats. "num_tokens":
      sum of the mask. "num_correct": counted positions whose likeliest token is
      the label. "num_rows": rows with a counted position. "num_exact": those of
      them that are right at every counted position.
    """
    # A comparison instead of a gather: each shard of the vocabulary reads its own.
    vocabulary_V = jnp.arange(logits_BLV.shape[-1])
    is_label_BLV = labels_BL[..., None] == vocabulary_V
    label_logits_BL = jnp.sum(jnp.where(is_label_BLV, logits_BLV, 0.0), axis=-1)
    losses_BL = jax.nn.logsumexp(logits_BLV, axis=-1) - label_logits_BL
    is_counted_BL = mask_BL > 0
    is_right_BL = jnp.argmax(logits_BLV, axis=-1) == labels_BL
    has_token_B = jnp.any(is_counted_BL, axis=-1)
    has_error_B = jnp.any(is_counted_BL & ~is_right_BL, axis=-1)
    return {
        "loss": jnp.sum(mask_BL * losses_BL),
        "num_tokens": jnp.sum(mask_BL),
        "num_correct": jnp.sum(is_counted_BL & is_right_BL, dtype=jnp.float32),
        "num_rows": jnp.sum(has_token_B, dtype=jnp.float32),
        "num_exact": jnp.sum(has_token_B & ~has_error_B, dtype=jnp.float32),
    }


def _embed_keys(spec: config.LanguageConfig, has_images: bool) -> frozenset[str]:
    reads = {
        "tokens_BL": True,
        "positions_BL": spec.kind == config.LanguageKind.GPT3,
        "image_index_BL": has_images,
        "dropout_key": spec.dropout > 0,
    }
    return frozenset(key for key, is_read in reads.items() if is_read)


def _look_up(table_VE: jax.Array, ids_BL: jax.Array) -> jax.Array:
    return jnp.take(table_VE, ids_BL, axis=0, mode="fill", fill_value=jnp.nan)


def _check_length(length: int, max_length: int) -> None:
    if length > max_length:
        raise errors.ConfigError(
            f"A microbatch has rows of {length} tokens, but "
            f"model.language.max_length={max_length}.\n"
            f"  Set --config.model.language.max_length to at least {length}, or feed "
            "shorter rows."
        )
