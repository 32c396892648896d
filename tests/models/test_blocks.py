"""The blocks against a small reference in NumPy, and what segments promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models import model


def norm(x, params, eps, is_rms):
    x = x - (0 if is_rms else x.mean(-1, keepdims=True))
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    return x * params["scale"] + params.get("bias", 0)


def dense(x, params):
    return x @ params["kernel"] + params.get("bias", 0)


def rope(x_LG, positions_L, theta):
    """Rotation as multiplication of complex numbers."""
    half = x_LG.shape[-1] // 2
    turns = np.exp(1j * positions_L[:, None] * theta ** (-np.arange(half) / half))
    z = (x_LG[:, :half] + 1j * x_LG[:, half:]) * turns
    return np.concatenate([z.real, z.imag], -1)


def gelu(x):
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def attend(x_LD, params, spec, positions_L, is_visible_LL):
    """One row, one head at a time."""
    heads = []
    for head in range(spec.num_heads):
        shared = head * spec.num_kv_heads // spec.num_heads
        q, k, v = (
            dense(x_LD, params[name]).reshape(len(x_LD), -1, spec.head_dim)[:, i]
            for name, i in (("query", head), ("key", shared), ("value", shared))
        )
        if spec.qk_norm:
            q = norm(q, params["query_norm"], spec.norm_eps, is_rms=True)
            k = norm(k, params["key_norm"], spec.norm_eps, is_rms=True)
        if spec.kind == "llama":
            q = rope(q, positions_L, spec.rope_theta)
            k = rope(k, positions_L, spec.rope_theta)
        logits = np.where(is_visible_LL, q @ k.T / np.sqrt(spec.head_dim), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        heads.append(weights / weights.sum(-1, keepdims=True) @ v)
    return dense(np.concatenate(heads, -1), params["output"])


def reference_block(x_LD, params, spec, positions_L, segment_ids_L):
    is_llama = spec.kind == "llama"
    is_visible_LL = np.tril(segment_ids_L[:, None] == segment_ids_L[None])
    h = norm(x_LD, params["attention_norm"], spec.norm_eps, is_llama)
    x_LD = x_LD + attend(h, params["attention"], spec, positions_L, is_visible_LL)
    h = norm(x_LD, params["mlp_norm"], spec.norm_eps, is_llama)
    mlp = params["mlp"]
    if is_llama:
        gate = dense(h, mlp["gate"])
        return x_LD + dense(
            gate / (1 + np.exp(-gate)) * dense(h, mlp["up"]), mlp["down"]
        )
    return x_LD + dense(gelu(dense(h, mlp["fc1"])), mlp["fc2"])


def block_of(spec):
    return model.build(spec, None).layers[1]


@pytest.fixture(name="carry_BLE")
def carry():
    return np.random.default_rng(1).normal(size=(2, 10, 16)).astype("f4")


KINDS = pytest.mark.parametrize(
    ("kind", "qk_norm"), [("llama", False), ("llama", True), ("gpt3", False)]
)


@KINDS
def test_block_equals_the_numpy_reference(
    make_language, make_feed, randomise, carry_BLE, kind, qk_norm
):
    spec = make_language(kind, qk_norm=qk_norm)
    layer, feed = block_of(spec), make_feed()
    params = randomise(jax.eval_shape(layer.init, jax.random.key(0)))
    got = jax.jit(layer.apply)(params, carry_BLE, feed)
    params = jax.tree.map(np.float64, params)
    for row in range(2):
        positions, segments = (
            np.asarray(feed[key][row]) for key in ("positions_BL", "segment_ids_BL")
        )
        want = reference_block(carry_BLE[row], params, spec, positions, segments)
        np.testing.assert_allclose(got[row], want, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("kind", ["llama", "gpt3"])
def test_padding_and_later_segments_influence_nothing_before(
    make_language, make_feed, randomise, carry_BLE, kind
):
    layer, feed = block_of(make_language(kind)), make_feed()
    params = randomise(jax.eval_shape(layer.init, jax.random.key(0)))
    apply = jax.jit(layer.apply)
    other = carry_BLE.copy()
    other[0, 7:] = 5.0  # row 0: the second segment
    other[1, 8:] = -5.0  # row 1: padding
    before, after = apply(params, carry_BLE, feed), apply(params, other, feed)
    np.testing.assert_array_equal(before[0, :7], after[0, :7])
    np.testing.assert_array_equal(before[1, :8], after[1, :8])
    assert np.any(before[0, 7:] != after[0, 7:])


@pytest.mark.parametrize("kind", ["llama", "gpt3"])
def test_packed_segments_equal_separate_rows(
    make_language, make_feed, randomise, carry_BLE, kind
):
    layer, feed = block_of(make_language(kind)), make_feed()
    params = randomise(jax.eval_shape(layer.init, jax.random.key(0)))
    packed = jax.jit(layer.apply)(params, carry_BLE, feed)
    for row, start, end in [(0, 0, 7), (0, 7, 10), (1, 0, 4), (1, 4, 8)]:
        length = end - start
        alone = {
            "positions_BL": jnp.arange(length)[None],
            "segment_ids_BL": jnp.ones((1, length), jnp.int32),
        }
        got = jax.jit(layer.apply)(params, carry_BLE[row : row + 1, start:end], alone)
        np.testing.assert_allclose(got[0], packed[row, start:end], rtol=1e-5, atol=1e-5)


def test_a_row_of_padding_gives_finite_gradients(
    make_language, make_feed, randomise, carry_BLE
):
    layer, feed = block_of(make_language()), make_feed()
    feed["segment_ids_BL"] = jnp.zeros_like(feed["segment_ids_BL"])
    params = randomise(jax.eval_shape(layer.init, jax.random.key(0)))
    grads = jax.jit(jax.grad(lambda p: layer.apply(p, carry_BLE, feed).sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
