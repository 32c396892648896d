"""Embedding with splice, and the head with its sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import errors
from rrfp_jax.models import language, model


def embed_of(spec, vision=None):
    return {layer.name: layer for layer in model.build(spec, vision).layers}[
        "language/embed"
    ]


def head_of(spec):
    return model.build(spec, None).layers[-1]


def test_image_tokens_land_where_image_index_says(
    make_language, make_vision, make_feed
):
    layer, feed = embed_of(make_language(), make_vision()), make_feed(num_images=2)
    params = layer.init(jax.random.key(0))
    y_NTE = np.random.default_rng(0).normal(size=(2, 6, 16)).astype("f4")
    got = np.asarray(layer.apply(params, jnp.asarray(y_NTE), feed))
    for row in range(2):
        for place in range(10):
            index = int(feed["image_index_BL"][row, place])
            token = int(feed["tokens_BL"][row, place])
            text = params["embedding"][token]
            want = text if index < 0 else y_NTE[index // 6, index % 6]
            np.testing.assert_array_equal(got[row, place], want)


def test_without_images_the_model_of_both_embeds_as_the_language_model(
    make_language, make_vision, make_feed
):
    spec, feed = make_language(), make_feed()
    params = embed_of(spec).init(jax.random.key(0))
    np.testing.assert_array_equal(
        embed_of(spec, make_vision()).apply(params, None, feed),
        embed_of(spec).apply(params, None, feed),
    )


def test_gpt3_adds_the_position_inside_the_segment(make_language, make_feed):
    layer, feed = embed_of(make_language("gpt3")), make_feed()
    params = layer.init(jax.random.key(0))
    got = layer.apply(params, None, feed)
    token = params["embedding"][feed["tokens_BL"][0, 8]]
    np.testing.assert_allclose(got[0, 8], token + params["positions"][1], rtol=1e-6)


def test_an_id_outside_the_vocabulary_is_nan_and_not_a_neighbour(
    make_language, make_feed
):
    layer, feed = embed_of(make_language()), make_feed()
    feed["tokens_BL"] = feed["tokens_BL"].at[1, 3].set(24)
    h_BLE = layer.apply(layer.init(jax.random.key(0)), None, feed)
    assert np.isnan(h_BLE[1, 3]).all()
    assert np.isnan(h_BLE).sum() == 16


def test_rows_longer_than_max_length_are_refused(make_language, make_feed):
    layer, feed = embed_of(make_language(max_length=8)), make_feed()
    with pytest.raises(errors.ConfigError, match=r"10 tokens.*max_length=8"):
        layer.apply(layer.init(jax.random.key(0)), None, feed)


@pytest.mark.parametrize("kind", ["llama", "gpt3"])
@pytest.mark.parametrize("tied", [False, True])
def test_head_sums_minus_log_softmax(make_language, make_feed, randomise, kind, tied):
    spec, feed = make_language(kind, tied=tied), make_feed()
    layer = head_of(spec)
    params = randomise(jax.eval_shape(layer.init, jax.random.key(0)))
    h = np.random.default_rng(2).normal(size=(2, 10, 16)).astype("f4")
    got = jax.jit(layer.apply)(params, h, feed)
    x = h - (0 if kind == "llama" else h.mean(-1, keepdims=True))
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + spec.norm_eps)
    x = x * params["norm"]["scale"] + params["norm"].get("bias", 0)
    logits = x @ (params["embedding"].T if tied else params["kernel"])
    log_softmax = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels, mask = np.asarray(feed["labels_BL"]), np.asarray(feed["mask_BL"])
    picked = np.take_along_axis(log_softmax, labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(got["loss"], -(picked * mask).sum(), rtol=1e-5)
    assert got["num_tokens"] == mask.sum()
    assert got["num_correct"] == ((logits.argmax(-1) == labels) * mask).sum()


def test_counts_of_tokens_and_of_rows():
    labels = jnp.array([[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3]])
    mask = jnp.array([[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1]], jnp.float32)
    guesses = jnp.array([[1, 2, 0], [1, 0, 3], [1, 2, 3], [0, 0, 3]])
    got = language.score(9 * jax.nn.one_hot(guesses, 4), labels, mask)
    assert {name: float(got[name]) for name in got if name != "loss"} == {
        "num_tokens": 6,
        "num_correct": 5,
        "num_rows": 3,
        "num_exact": 2,
    }
    assert all(
        value.dtype == jnp.float32 and value.shape == () for value in got.values()
    )


def test_a_fully_masked_microbatch_gives_zero_loss_and_zero_gradients(
    make_language, make_feed, randomise
):
    layer, feed = head_of(make_language()), make_feed()
    feed["mask_BL"] = jnp.zeros_like(feed["mask_BL"])
    feed["labels_BL"] = jnp.full_like(feed["labels_BL"], -100)
    params = randomise(jax.eval_shape(layer.init, jax.random.key(0)))
    h = np.random.default_rng(2).normal(size=(2, 10, 16)).astype("f4")

    def loss(params, h):
        return layer.apply(params, h, feed)["loss"]

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(params, h)
    assert value == 0
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(grads))
