"""Small sums of what B has are B's: their terms need not cross."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from rrfp_jax.runtime.slicing import halve

ROWS, WIDTH, OUT = 32, 16, 24


def layer(params, x):
    """A norm with a scale, a product, a bias."""
    normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
    return jnp.tanh((normed * params["scale"]) @ params["w"] + params["bias"])


def scanned(params, x):
    """The same twice, as a scan; its output has the width of its input."""

    def body(carry, each):
        return layer(each, carry)[:, :WIDTH], None

    return jax.lax.scan(body, x, params)[0]


PARAMS = {
    "bias": np.linspace(-1, 1, OUT, dtype=np.float32),
    "scale": np.linspace(0.5, 1.5, WIDTH, dtype=np.float32),
    "w": np.linspace(-1, 1, WIDTH * OUT, dtype=np.float32).reshape(WIDTH, OUT),
}
STACKED = jax.tree.map(lambda leaf: np.stack([leaf, leaf / 2]), PARAMS)
X = np.linspace(-2, 2, ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def backward(fn, params):
    """Returns the backward as a program of residuals and cotangent, and its arguments.

    Outputs: the cotangent of x, then the gradients by name.
    """
    out, pullback = jax.vjp(fn, params, X)
    residuals, treedef = jax.tree.flatten(pullback)

    def run(*flat):
        grads, onward = jax.tree.unflatten(treedef, flat[:-1])(flat[-1])
        return [onward, *jax.tree.leaves(grads)]

    arguments = [*residuals, jnp.ones_like(out)]
    return jax.make_jaxpr(run)(*arguments), arguments


@pytest.mark.parametrize("fn", [layer, scanned])
def test_a_bias_and_a_scale_cross_as_their_gradients(fn):
    params = PARAMS if fn is layer else STACKED
    closed, arguments = backward(fn, params)
    halves = halve(closed, [0])
    crossing = [var.aval.shape for var in halves.first.jaxpr.outvars[1:]]
    layers = () if fn is layer else (2,)
    small = [(*layers, OUT), (*layers, WIDTH)]
    assert sorted(crossing) == sorted([*small, (*layers, ROWS, OUT)])
    first = jax.jit(jex.jaxpr_as_fun(halves.first))(*arguments)
    given = [arguments[i] for i in halves.needed]
    second = jax.jit(jex.jaxpr_as_fun(halves.second))(*given, *first[1:])
    whole = jax.jit(jex.jaxpr_as_fun(closed))(*arguments)
    for found, expected in zip([first[0], *second], whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_second_half_is_left_with_the_product():
    """And with sums over axes of one, which cost nothing."""
    closed, _ = backward(layer, PARAMS)
    eqns = halve(closed, [0]).second.jaxpr.eqns
    assert "dot_general" in [eqn.primitive.name for eqn in eqns]
    sums = [eqn for eqn in eqns if eqn.primitive.name == "reduce_sum"]
    assert all(eqn.invars[0].aval.size <= OUT for eqn in sums)


def test_a_sum_that_needs_a_product_of_w_stays_there():
    """The second parameter's gradient is a sum of what only W computes."""

    def fn(x, w, ct):
        grad = x.T @ ct
        return ct @ w.T, grad, jnp.sum(grad * 2.0, axis=0)

    closed = jax.make_jaxpr(fn)(X, PARAMS["w"], np.ones((ROWS, OUT), np.float32))
    halves = halve(closed, [0])
    assert halves.num_crossing == 0
    names = [eqn.primitive.name for eqn in halves.second.jaxpr.eqns]
    assert {"dot_general", "reduce_sum"} <= set(names)


def test_a_sum_that_is_not_small_stays_there():
    def fn(x, ct):
        scaled = jnp.tanh(ct)
        return scaled * x, jnp.sum(scaled.reshape(ROWS // 2, 2, OUT), axis=1)

    closed = jax.make_jaxpr(fn)(np.ones((ROWS, OUT), np.float32), np.ones((ROWS, OUT)))
    halves = halve(closed, [0])
    assert [v.aval.shape for v in halves.first.jaxpr.outvars[1:]] == [(ROWS, OUT)]
