"""FLOPs by formula against XLA's own count of the compiled layer."""

import jax
import jax.numpy as jnp
import pytest

from rrfp_jax.models import layer, model

SHAPE = layer.Shape(rows=2, length=64, num_images=3)


@pytest.fixture
def layers(make_language, make_vision):
    built = model.build(
        make_language(
            vocab_size=1024,
            width=256,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            mlp_width=512,
            max_length=64,
        ),
        make_vision(
            image_size=(64, 32),
            patch_size=8,
            width=256,
            num_heads=4,
            mlp_width=1024,
        ),
    )
    return {each.name: each for each in built.layers}


def compiled_flops(each, carry_shape):
    def of(shape, dtype="int32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = (SHAPE.rows, SHAPE.length)
    feed = {
        "positions_BL": of(rows),
        "segment_ids_BL": of(rows),
        "labels_BL": of(rows),
        "mask_BL": of(rows, "float32"),
        "images_NHWC": of((SHAPE.num_images, 64, 32, 3), "float32"),
    }
    params = jax.eval_shape(each.init, jax.random.key(0))
    carry = carry_shape and of(carry_shape, jnp.float32)
    lowered = jax.jit(each.apply).lower(params, carry, feed)
    return lowered.compile().cost_analysis()["flops"]


@pytest.mark.parametrize(
    ("name", "carry_shape"),
    [
        ("language/block_00", (2, 64, 256)),
        ("language/head", (2, 64, 256)),
        ("vision/patch_embed", None),
        ("vision/block_00", (3, 32, 256)),
        ("projector", (3, 32, 256)),
    ],
)
def test_flops_are_those_that_xla_counts(layers, name, carry_shape):
    counted = compiled_flops(layers[name], carry_shape)
    assert layers[name].flops(SHAPE) == pytest.approx(counted, rel=0.1)


def test_a_microbatch_without_images_costs_the_vision_tower_nothing(layers):
    blind = layer.Shape(rows=2, length=64, num_images=0)
    assert layers["vision/block_00"].flops(blind) == 0
    assert layers["projector"].flops(blind) == 0
