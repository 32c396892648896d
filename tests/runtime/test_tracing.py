"""What a traced stage keeps for its backward, and what it passes by reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from rrfp_jax import Pipeline, Policy, Stage
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime.split_backward import split_backward
from rrfp_jax.runtime.stage import flatten
from rrfp_jax.runtime.tracing import Signature, trace_stage
from tests.runtime import toys

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
W = np.linspace(-0.5, 0.7, 20, dtype=np.float32).reshape(4, 5)
POLICIES = jax.checkpoint_policies


class Program:
    """A stage traced alone: one source that wants a cotangent, one target, a feed."""

    def __init__(self, fn, params, x, feed=None, is_loss=False, frozen=False):
        self.params, self._fn, self._feed = params, fn, feed
        stage = Stage(fn, frozen)
        self.arrays, layout = flatten(params)
        self.rest = [*flatten(x)[0], *flatten(feed)[0]]
        self.x = x
        self._signature = Signature(
            params=layout,
            sources=(flatten(x)[1],),
            wants_cotangent=(True,),
            num_targets=1,
            feed=flatten(feed)[1],
            has_backward=True,
            is_split=False,
            is_loss=is_loss,
        )
        self.traced = trace_stage(stage, self._signature, stage.trained(params))

    @functools.cached_property
    def results(self):
        return jax.jit(self.traced.forward)(self.arrays, self.rest)

    @property
    def kept(self):
        """Shape and dtype of the arrays that only the backward needs."""
        return [(a.shape, str(a.dtype)) for a in self.results[1]]

    @property
    def saved(self):
        """Shape and dtype of all that is held from forward to backward."""
        pool = [*self.rest, *self.results[0], *self.results[1]]
        return [(pool[i].shape, str(pool[i].dtype)) for i in self.traced.saved]

    @property
    def held(self):
        """The arrays that are held from forward to backward."""
        pool = [*self.rest, *self.results[0], *self.results[1]]
        return [pool[i] for i in self.traced.saved]

    @functools.cached_property
    def halves(self):
        return split_backward(self.traced, self._signature)

    def backward(self, cotangents):
        """Returns (parameter gradients, input cotangents)."""
        run = jax.jit(self.traced.backward)
        grads, onward = run(self.arrays, self.held, [cotangents])
        return grads, onward[0]

    def split_backward(self, cotangents):
        """Returns the same, and the arrays that are held from B to W."""
        held = self.held
        onward, crossing = jax.jit(self.halves.backward)(
            self.arrays, held, [cotangents]
        )
        pool = [*held, *cotangents, *crossing]
        kept = [pool[i] for i in self.halves.kept]
        grads = jax.jit(self.halves.weight)(self.arrays, kept)
        return (grads, onward[0]), kept

    def check(self, relative=1e-5):
        """Asserts forward and backward equal `jax.vjp` of the whole function."""
        outputs, pullback = jax.vjp(
            lambda p, x: self._fn(p, x, self._feed), self.params, self.x
        )
        toys.assert_close(self.results[0], flatten(outputs)[0])
        given = jax.tree.map(jnp.ones_like, outputs)
        grads, onward = pullback(given)
        found = self.backward(flatten(given)[0])
        expected = (jax.tree.leaves(grads), jax.tree.leaves(onward))
        toys.assert_close(found, expected, relative)
        in_two, _ = self.split_backward(flatten(given)[0])
        toys.assert_close(in_two, expected, relative)


def dense(params, x, feed):
    return jnp.sin(x @ params["w"])


def test_parameters_inputs_and_outputs_are_passed_by_reference():
    """Of sin(x @ w), only the cosine is an array of its own."""
    program = Program(dense, {"w": W}, X)
    program.check()
    assert program.kept == [((3, 5), "float32")]
    assert sorted(program.saved) == [((3, 4), "float32"), ((3, 5), "float32")]
    assert 0 in program.traced.saved  # the input itself


def test_an_output_that_is_a_residual_is_not_kept_twice():
    """exp(x @ w) is its own derivative."""
    program = Program(lambda params, x, feed: jnp.exp(x @ params["w"]), {"w": W}, X)
    program.check()
    assert program.kept == []
    assert program.traced.saved == (0, 1)


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        lambda fn: jax.jit(jax.jit(fn)),
        lambda fn: lambda p, x, f: jax.jit(lambda x, p: fn(p, x, f))(x, p),
        lambda fn: jax.jit(lambda p, x, f: fn(p, jax.jit(jnp.asarray)(x), f)),
    ],
    ids=["jit", "nested", "swapped", "around_a_part"],
)
def test_jit_inside_a_stage_hides_nothing(wrap):
    program = Program(wrap(dense), {"w": W}, X)
    program.check()
    assert program.kept == [((3, 5), "float32")]


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["bare", "jit"])
def test_a_cast_of_a_parameter_is_computed_again(wrap):
    """The bfloat16 copy and the transpose of `w` cost no memory per microbatch."""

    def mixed(params, x, feed):
        w = params["w"].astype(jnp.bfloat16)
        return jnp.exp(x.astype(jnp.bfloat16) @ jax.jit(jnp.transpose)(w))

    program = Program(wrap(mixed), {"w": W.T.copy()}, X)
    program.check(relative=2**-8)  # XLA may leave out a rounding to bfloat16
    assert program.kept == [((3, 4), "bfloat16")]  # the cast input
    assert all(shape != W.shape and shape != W.T.shape for shape, _ in program.saved)


def test_a_function_of_parameters_alone_is_computed_again():
    def normed(params, x, feed):
        w = params["w"] / jnp.linalg.norm(params["w"], axis=0)
        return x @ (w * jax.nn.softplus(params["g"]))

    program = Program(normed, {"w": W, "g": np.ones(5, np.float32)}, X)
    program.check()
    assert program.kept == []
    assert program.saved == [((3, 4), "float32")]


def test_nothing_saveable_keeps_nothing():
    def block(params, x, feed):
        return jnp.tanh(jnp.tanh(x @ params["w"]) @ params["w"].T)

    program = Program(
        jax.checkpoint(block, policy=POLICIES.nothing_saveable), {"w": W}, X
    )
    program.check()
    assert program.kept == []
    assert program.saved == [((3, 4), "float32")]
    assert len(Program(block, {"w": W}, X).kept) > 1  # the control


def test_a_recomputation_policy_keeps_what_it_names():
    def block(params, x, feed):
        h = checkpoint_name(x @ params["w"], "product")
        return jnp.sum(jnp.cos(jnp.sin(h)), axis=1)

    saving = jax.checkpoint(block, policy=POLICIES.save_only_these_names("product"))
    program = Program(saving, {"w": W}, X)
    program.check()
    assert program.kept == [((3, 5), "float32")]
    assert len(Program(block, {"w": W}, X).kept) > 1


@jax.custom_vjp
def clipped(x):
    return x * 2


clipped.defvjp(lambda x: (x * 2, x), lambda x, g: (jnp.clip(g * x, -0.1, 0.1),))


@jax.custom_jvp
def steep(x):
    return jnp.abs(x)


steep.defjvp(lambda primals, tangents: (steep(*primals), 3 * tangents[0]))


def scanned(params, x, feed):
    def body(carry, w):
        return jnp.tanh(carry @ w), jnp.sum(carry)

    carry, sums = jax.lax.scan(body, x, jnp.stack([params["w"]] * 3))
    return carry, sums


def branching(params, x, feed):
    return jax.lax.cond(
        feed["flag"], lambda x: x @ params["w"], lambda x: jnp.sin(x) @ params["w"], x
    )


SQUARE = {"w": W[:, :4]}
FUNCTIONS = {
    "custom_vjp": (lambda p, x, f: clipped(x @ p["w"]), {"w": W}, None),
    "custom_jvp": (lambda p, x, f: steep(x @ p["w"]), {"w": W}, None),
    "custom_vjp_in_jit": (jax.jit(lambda p, x, f: clipped(x @ p["w"])), {"w": W}, None),
    "custom_jvp_in_checkpoint": (
        jax.checkpoint(lambda p, x, f: jax.nn.relu(steep(x @ p["w"]))),
        {"w": W},
        None,
    ),
    "scan": (scanned, SQUARE, None),
    "scan_of_checkpoint": (jax.checkpoint(scanned), SQUARE, None),
    "cond_true": (branching, {"w": W}, {"flag": np.bool_(True)}),
    "cond_false": (branching, {"w": W}, {"flag": np.bool_(False)}),
    "integer_feed": (
        lambda p, x, f: p["w"][f["i"]] * x.sum(),
        {"w": W},
        {"i": np.int32([0, 2])},
    ),
    "unused_input": (lambda p, x, f: p["w"] * 2, {"w": W}, None),
    "unused_parameter": (lambda p, x, f: x * 2, {"w": W}, None),
    "nothing_used": (lambda p, x, f: jnp.ones(2), {"w": W}, None),
    "parameter_used_twice": (lambda p, x, f: x @ p["w"] @ p["w"].T, {"w": W}, None),
    "parameter_returned": (lambda p, x, f: (p["w"], x @ p["w"]), {"w": W}, None),
    "input_returned": (lambda p, x, f: (x, x @ p["w"], x), {"w": W}, None),
    "None_in_the_tree": (
        lambda p, x, f: {"h": x @ p["w"], "none": p["none"]},
        {"w": W, "none": None},
        None,
    ),
    "closed_over_array": (lambda p, x, f: (x + 2 * X) @ p["w"], {"w": W}, None),
    "vmap": (jax.vmap(dense, (None, 0, None)), {"w": W}, None),
    "while_loop_without_gradient": (
        lambda p, x, f: x @ p["w"] * jax.lax.stop_gradient(
            jax.lax.while_loop(lambda c: c < 3, lambda c: c + 1, 0)
        ),
        {"w": W},
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_and_backward_are_those_of_vjp(name):
    fn, params, feed = FUNCTIONS[name]
    Program(fn, params, X, feed).check()


def test_frozen_keys_have_no_gradient_and_keep_no_residual():
    """The input is needed for the gradient of `w` alone."""
    params = {"w": W, "b": np.ones(5, np.float32)}

    def affine(params, x, feed):
        return x @ params["w"] + params["b"]

    program = Program(affine, params, X, frozen=("w",))
    assert program.saved == []
    (grad,), (onward,) = program.backward([jnp.ones((3, 5))])
    np.testing.assert_allclose(grad, np.full(5, 3.0))
    np.testing.assert_allclose(onward, np.ones((3, 5)) @ W.T, rtol=1e-6)


def test_unknown_frozen_keys_are_a_config_error():
    with pytest.raises(ConfigError, match=r"frozen keys \['v'\].*\n.*top-level"):
        Program(dense, {"w": W}, X, frozen=("w", "v"))


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda x: x, r"float32\[3,4\]"),
        (lambda x: (x, None), r"\(.*float32\[3,4\].*, None\)"),
        (lambda x: {"loss": x.sum()}, r"{'loss': .*float32\[\].*}"),
        (lambda x: 0.0, r"~float32\[\]"),
    ],
    ids=["array", "pair", "dict", "python_float"],
)
def test_a_last_stage_without_a_scalar_loss_is_a_config_error(returned, shown):
    with pytest.raises(ConfigError, match=f"scalar loss.*it returned .*{shown}"):
        Program(lambda p, x, f: returned(x), {"w": W}, X, is_loss=True)


def test_the_loss_may_come_with_integers_and_nothing():
    """Auxiliary outputs have no cotangent, whatever their dtype."""

    def fn(params, x, feed):
        y = x @ params["w"]
        return jnp.sum(y), {"count": jnp.int32(3), "y": y, "none": None, "n": 4}

    program = Program(fn, {"w": W}, X, is_loss=True)
    (grad,), (onward,) = program.backward([jnp.float32(0.5)])
    np.testing.assert_allclose(
        grad, 0.5 * np.repeat(X.sum(0)[:, None], 5, 1), rtol=1e-6
    )
    np.testing.assert_allclose(onward, 0.5 * np.tile(W.sum(1), (3, 1)), rtol=1e-6)


def test_gradients_are_summed_in_float32_whatever_the_parameters_are():
    params = {"w": jnp.asarray(W, jnp.bfloat16)}
    batch = [{"x": X}] * 2
    for hint in ("bf", "bfw"):
        one = Pipeline(
            [lambda p, _, feed: jnp.sum(dense(p, feed["x"], None)).astype(jnp.float32)],
            [params],
            policy=Policy(hint),
        )
        _, (grads,) = one.loss_and_grad([params], batch)
        assert grads["w"].dtype == jnp.float32
