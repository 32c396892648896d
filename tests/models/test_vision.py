"""The vision tower: patches, blocks and projector."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models import cut, model, vision


def test_patches_go_row_by_row():
    image = jnp.arange(4 * 6).reshape(1, 4, 6, 1)
    assert vision.patchify(image, 2)[0].tolist() == [
        [0, 1, 6, 7],
        [2, 3, 8, 9],
        [4, 5, 10, 11],
        [12, 13, 18, 19],
        [14, 15, 20, 21],
        [16, 17, 22, 23],
    ]


@pytest.fixture
def tower(make_language, make_vision):
    return model.build(make_language(), make_vision()).towers[0]


def test_each_image_is_encoded_on_its_own(tower, make_feed, randomise):
    encode = jax.jit(cut.run(tower.layers))
    params = {
        layer.name: randomise(jax.eval_shape(layer.init, jax.random.key(0)))
        for layer in tower.layers
    }
    images = make_feed(num_images=2)["images_NHWC"]
    both = encode(params, None, {"images_NHWC": images})
    swapped = encode(params, None, {"images_NHWC": images[::-1]})
    assert both.shape == (2, 6, 16)
    np.testing.assert_allclose(both, swapped[::-1], rtol=1e-5, atol=1e-5)
    assert not np.allclose(both[0], both[1])


def test_every_patch_sees_all_others(tower, randomise):
    block = tower.layers[1]
    params = randomise(jax.eval_shape(block.init, jax.random.key(0)))
    x_NTD = np.random.default_rng(5).normal(size=(1, 6, 8)).astype("f4")
    jacobian = jax.jit(jax.jacrev(lambda x: block.apply(params, x, {})))(x_NTD)
    influence_TT = np.abs(jacobian[0, :, :, 0]).sum((1, 3))
    assert np.all(influence_TT > 0)
