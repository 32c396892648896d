"""The vision tower: a ViT and the projector into the language model's width.

Legend: N images of H x W pixels with C channels, T patches an image, D vision
width, E language width.
"""

from collections.abc import Callable

import jax
from flax import nnx

from rrfp_jax.models import attention, block, blueprint, config, dense, layer, partition

NORM_EPS = 1e-6  # as published, arXiv:2010.11929


def blueprints(
    spec: config.VisionConfig, language_width: int
) -> list[tuple[str, blueprint.Blueprint]]:
    """Returns (global layer name, blueprint) from the first layer to the last."""
    dropout_keys = {"dropout_key"} if spec.dropout else set()
    patch_features = spec.patch_size**2 * spec.channels
    patch_embed = blueprint.draw(
        lambda rngs: PatchEmbed(spec, rngs),
        compute_dtype=spec.compute_dtype,
        feed_keys=frozenset({"images_NHWC"} | dropout_keys),
        flops=_token_flops(spec, patch_features * spec.width),
    )
    body_spec = block_spec(spec)
    body = blueprint.draw(
        lambda rngs: block.Block(body_spec, rngs),
        compute_dtype=spec.compute_dtype,
        feed_keys=body_spec.feed_keys,
        flops=lambda shape: body_spec.flops(shape.num_images, spec.tokens_per_image),
    )
    projector = blueprint.draw(
        lambda rngs: Projector(spec, language_width, rngs),
        compute_dtype=spec.compute_dtype,
        feed_keys=frozenset(),
        flops=_token_flops(spec, (spec.width + language_width) * language_width),
    )
    blocks = [(f"vision/block_{i:02d}", body) for i in range(spec.num_layers)]
    return [("vision/patch_embed", patch_embed), *blocks, ("projector", projector)]


def block_spec(spec: config.VisionConfig) -> block.BlockSpec:
    """Returns the parts of a ViT block: every patch of an image sees all others."""
    return block.BlockSpec(
        attention=attention.AttentionSpec(
            width=spec.width,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.width // spec.num_heads,
            num_residuals=2 * spec.num_layers,
            use_bias=True,
            is_causal=False,
            rope_theta=None,
            qk_norm_eps=None,
            compute_dtype=spec.compute_dtype,
        ),
        mlp_width=spec.mlp_width,
        is_gated=False,
        is_rms=False,
        norm_eps=NORM_EPS,
        dropout=spec.dropout,
    )


class PatchEmbed(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """Maps each patch to a token and adds a learned position."""

    def __init__(self, spec: config.VisionConfig, rngs: nnx.Rngs) -> None:
        self.spec = spec
        num_in = spec.patch_size**2 * spec.channels
        self.patches = dense.replicated(num_in, spec.width, rngs)
        shape = spec.tokens_per_image, spec.width
        self.positions = dense.table(*shape, partition.REPLICATED, rngs)
        self.dropout = nnx.Dropout(spec.dropout)

    def __call__(
        self, carry: None, feed: layer.Feed, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Returns x_NTD in the compute dtype; patches go row by row."""
        del carry
        patches = patchify(feed["images_NHWC"], self.spec.patch_size)
        x_NTD = self.patches(patches.astype(self.spec.compute_dtype))
        dropped_NTD: jax.Array = self.dropout(
            x_NTD + self.positions[...],
            deterministic=dropout_key is None,
            rngs=dropout_key,
        )
        return dropped_NTD


class Projector(nnx.Module):  # type: ignore[misc]  # flax is untyped to mypy
    """The tower's final norm and a two-layer MLP to the language width.

    The MLP is that of LLaVA-1.5 (arXiv:2310.03744 §3.2).
    """

    def __init__(
        self, spec: config.VisionConfig, language_width: int, rngs: nnx.Rngs
    ) -> None:
        self.spec = spec
        self.norm = dense.layer_norm(spec.width, NORM_EPS, rngs)
        self.fc1 = dense.column(spec.width, language_width, True, rngs)
        self.fc2 = dense.row(language_width, language_width, True, 1, rngs)

    def __call__(
        self, x_NTD: jax.Array, feed: layer.Feed, dropout_key: jax.Array | None
    ) -> jax.Array:
        """Returns y_NTE in the compute dtype."""
        del feed, dropout_key
        h_NTD = self.norm(x_NTD).astype(self.spec.compute_dtype)
        y_NTE: jax.Array = self.fc2(jax.nn.gelu(self.fc1(h_NTD), approximate=True))
        return y_NTE


def patchify(images_NHWC: jax.Array, patch_size: int) -> jax.Array:
    """Cuts images into square patches, row by row.

    Returns:
      (N, T, patch_size * patch_size * C); pixels of a patch go row by row.
    """
    num_images, height, width, channels = images_NHWC.shape
    rows, columns = height // patch_size, width // patch_size
    grid = images_NHWC.reshape(
        num_images, rows, patch_size, columns, patch_size, channels
    )
    return grid.swapaxes(2, 3).reshape(num_images, rows * columns, -1)


def _token_flops(
    spec: config.VisionConfig, num_weights: int
) -> Callable[[layer.Shape], float]:
    """Returns the FLOPs of maps with that many weights, applied to every patch."""
    return lambda shape: 2.0 * shape.num_images * spec.tokens_per_image * num_weights
