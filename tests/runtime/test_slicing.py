"""The split backward: B and W together return what the whole returns, and cost as much.

A case is a function of (parameters, input). Its backward is halved in two styles:
`whole`, where the forward is part of it, and `residuals`, where what the forward kept
is an input, as in the runtime.
"""

import dataclasses
import functools
import math
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex

from rrfp_jax.runtime import jaxprs
from rrfp_jax.runtime.slicing import dissolve, halve

POLICIES = jax.checkpoint_policies
BATCH, SEQ, WIDTH, HEADS, LAYERS = 4, 32, 64, 4, 2


@dataclasses.dataclass
class Case:
    """A backward, its arguments, and its halves."""

    closed: jex.ClosedJaxpr
    args: list
    wanted: tuple
    free: tuple
    cotangents: tuple = ()

    @functools.cached_property
    def halves(self):
        return halve(self.closed, self.wanted, self.free, self.cotangents)

    @property
    def crossing(self):
        """Shape and dtype of what crosses."""
        at = len(self.halves.first.jaxpr.outvars) - self.halves.num_crossing
        avals = [v.aval for v in self.halves.first.jaxpr.outvars[at:]]
        return [(a.shape, str(a.dtype)) for a in avals]

    @property
    def products(self):
        """How many products each half computes."""
        halves = (self.halves.first, self.halves.second)
        return [count(half, "dot_general") for half in halves]

    @property
    def second_args(self):
        crossing = run(self.halves.first, self.args)[len(self.wanted) :]
        return [*(self.args[i] for i in self.halves.needed), *crossing]

    def together(self):
        """Runs both halves, one after the other, and puts the outputs in order."""
        firsts = run(self.halves.first, self.args)
        given = [*(self.args[i] for i in self.halves.needed)]
        given += firsts[len(self.wanted) :]
        rest = iter(run(self.halves.second, given))
        made = dict(zip(self.wanted, firsts[: len(self.wanted)], strict=True))
        num_outputs = len(self.closed.jaxpr.outvars)
        return [made[i] if i in made else next(rest) for i in range(num_outputs)]

    def check(self):
        """Compares the halves with the whole; returns the case."""
        jex.check_jaxpr(self.halves.first.jaxpr)
        jex.check_jaxpr(self.halves.second.jaxpr)
        expected = run(self.closed, self.args)
        for got, want in zip(self.together(), expected, strict=True):
            assert got.dtype == want.dtype
            got, want = (np.asarray(a, np.float64) for a in (got, want))
            # An intermediate in bfloat16 is rounded where XLA does not fuse it away.
            wide = 3e-2 if self.is_bfloat16 else 2e-5
            scale = np.max(np.abs(want), initial=1e-3)
            np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=wide)
        return self

    @property
    def is_bfloat16(self):
        return "bf16" in str(self.closed)

    def ratios(self):
        """Returns (FLOPs(B) + FLOPs(W)) / FLOPs(whole): by XLA, and of products."""
        halves = self.halves
        xla = flops(halves.first, self.args) + flops(halves.second, self.second_args)
        dots = dot_flops(halves.first.jaxpr) + dot_flops(halves.second.jaxpr)
        return (
            xla / flops(self.closed, self.args),
            dots / dot_flops(dissolve(self.closed).jaxpr),
        )


def run(closed, args):
    return compiled(closed, args)(*args)


def flops(closed, args):
    return compiled(closed, args).cost_analysis()["flops"]


def compiled(closed, args):
    if closed not in PROGRAMS:
        lowered = jax.jit(jex.jaxpr_as_fun(closed)).lower(*args)
        PROGRAMS[closed] = lowered.compile()
    return PROGRAMS[closed]


PROGRAMS = weakref.WeakKeyDictionary()


def equations(jaxpr, times=1):
    """Yields every equation with the number of times that it runs."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = times * eqn.params.get("length", 1)
        for sub in jex.jaxprs_in_params(eqn.params):
            yield from equations(sub, inner)


def dot_flops(jaxpr):
    total = 0
    for eqn, times in equations(jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            depth = math.prod(shape[i] for i in contracted)
            total += 2 * times * depth * math.prod(eqn.outvars[0].aval.shape)
    return total


def count(closed, name):
    """Counts how often a primitive runs."""
    found = equations(closed.jaxpr)
    return sum(times for eqn, times in found if eqn.primitive.name == name)


def backward(fn, params, x, style, wants=True, cotangents=False):
    """Makes the case of a function in a style; the inexact leaves of x are wanted."""
    leaves, treedef = jax.tree.flatten((params, x))
    num_params = len(jax.tree.leaves(params))
    inexact = [i for i, a in enumerate(leaves) if jnp.issubdtype(a.dtype, jnp.inexact)]

    def flat(*arrays):
        return fn(*jax.tree.unflatten(treedef, arrays))

    inlined = jaxprs.inline(jax.make_jaxpr(flat)(*leaves))

    def pullback(*arrays):
        def inner(diff):
            given = list(arrays)
            for i, value in zip(inexact, diff, strict=True):
                given[i] = value
            return inlined(*given)[0]

        return jax.vjp(inner, [arrays[i] for i in inexact])

    out = jax.eval_shape(flat, *leaves)
    ct = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    ct = ct.astype(out.dtype)
    outs = tuple(k for k, i in enumerate(inexact) if i >= num_params) if wants else ()
    free = tuple(range(num_params))
    if style == "whole":
        closed = jax.make_jaxpr(lambda *a: pullback(*a[:-1])[1](a[-1])[0])(*leaves, ct)
        case = Case(closed, [*leaves, ct], outs, free)
    else:
        closed, saved = _of_residuals(pullback, leaves, num_params, ct)
        case = Case(closed, [*leaves[:num_params], *saved, ct], outs, free)
    if cotangents:
        case.cotangents = (len(case.args) - 1,)
    if not wants:
        # As in the first stage, which never asks for the cotangents of its input.
        keep = [
            v
            for v, i in zip(case.closed.jaxpr.outvars, inexact, strict=True)
            if i < num_params
        ]
        case.closed = jaxprs.with_outputs(case.closed, keep, keep_effects=True)
    return case


def _of_residuals(pullback, leaves, num_params, ct):
    """Traces a backward whose inputs are parameters, residuals and cotangent."""
    found = []

    def forward(*arrays):
        residuals, treedef = jax.tree.flatten(pullback(*arrays)[1])
        found.append(treedef)
        return residuals

    closed = jax.make_jaxpr(forward)(*leaves)
    jaxpr = closed.jaxpr
    of_data = jaxprs.depends_on(jaxpr, jaxpr.invars[num_params:])
    is_saved = [isinstance(v, jex.Var) and v in of_data for v in jaxpr.outvars]
    again = jaxprs.with_outputs(
        closed,
        [v for v, s in zip(jaxpr.outvars, is_saved, strict=True) if not s],
        keep_effects=False,
    )
    values = jex.jaxpr_as_fun(closed)(*leaves)
    saved = [v for v, s in zip(values, is_saved, strict=True) if s]
    dead = [jnp.zeros(a.shape, a.dtype) for a in leaves[num_params:]]

    def run_backward(*args):
        params, kept, last = args[:num_params], iter(args[num_params:-1]), args[-1]
        recomputed = iter(jex.jaxpr_as_fun(again)(*params, *dead))
        mixed = [next(kept) if s else next(recomputed) for s in is_saved]
        return jax.tree.unflatten(found[-1], mixed)(last)[0]

    return jax.make_jaxpr(run_backward)(*leaves[:num_params], *saved, ct), saved


def array(*shape, seed=0, scale=0.3, dtype=jnp.float32):
    values = np.random.default_rng((seed, *shape)).normal(size=shape) * scale
    return jnp.asarray(values, dtype)


# Small models.


def dense_params(num_layers=3, width=5):
    return [
        {"w": array(width, width, seed=i), "b": array(width, seed=i)}
        for i in range(num_layers)
    ]


def mlp(params, x):
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def jitted_mlp(params, x):
    block = jax.jit(lambda layer, x: jax.jit(jnp.tanh)(x @ layer["w"] + layer["b"]))
    for layer in params:
        x = block(layer, x)
    return x


def block_params(seed, width=WIDTH):
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
    }
    params = {k: array(*s, seed=seed, scale=s[0] ** -0.5) for k, s in shapes.items()}
    return {**params, "norm1": 1 + array(width), "norm2": 1 + array(width, seed=1)}


def norm(scale, x):
    return scale * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def transformer_block(p, x_BLD):
    batch, seq, width = x_BLD.shape
    heads = (batch, seq, HEADS, width // HEADS)
    qkv = jnp.split(norm(p["norm1"], x_BLD) @ p["qkv"], 3, -1)
    q, k, v = (a.reshape(heads) for a in qkv)
    logits = jnp.einsum("blhd,bmhd->bhlm", q, k) * heads[-1] ** -0.5
    logits = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), logits, -1e9)
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(logits), v)
    x_BLD = x_BLD + mixed.reshape(x_BLD.shape) @ p["out"]
    return x_BLD + jax.nn.gelu(norm(p["norm2"], x_BLD) @ p["up"]) @ p["down"]


def unrolled(block):
    def fn(params, x):
        for layer in params:
            x = block(layer, x)
        return x

    return fn


def scanned(block, **options):
    def fn(params, x):
        return jax.lax.scan(lambda x, p: (block(p, x), None), x, params, **options)[0]

    return fn


def transformer_params():
    return [block_params(i) for i in range(LAYERS)]


def stacked(layers):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"])


def shared_scan(params, x):
    def body(x, p):
        return layer(p, x) @ params["shared"] + params["shared"][0], None

    return jax.lax.scan(body, x, params["layers"])[0]


def nested_scan(params, x):
    def outer(x, p):
        def inner(x, q):
            return jnp.sin(layer(q, x) @ params["shared"]), None

        return jax.lax.scan(inner, x, p)[0] @ params["shared"], None

    return jax.lax.scan(outer, x, params["layers"])[0]


@jax.custom_vjp
def doubled(w, x):
    return x @ w


doubled.defvjp(
    lambda w, x: (x @ w, (w, x)),
    lambda kept, ct: (2 * kept[1].T @ ct, 2 * ct @ kept[0].T),
)


def custom_rules(params, x):
    x = jax.nn.relu(doubled(params["a"], x))
    x = jax.nn.gelu(x @ params["b"])
    return jax.nn.logsumexp(x @ params["c"], axis=-1)


def branches(params, x):
    def one(p, x):
        return jnp.tanh(x @ p["a"]) @ p["b"]

    def other(p, x):
        return jnp.sin(jnp.sin(jnp.cos(x) @ p["b"]) @ p["a"]) @ p["c"]

    x = jnp.tanh(x @ params["a"])
    for i in range(2):
        x = jax.lax.cond(x[0, i] > 0, one, other, params, x)
    return x


def undifferentiated_loops(params, x):
    scale = jax.lax.stop_gradient(jnp.abs(x).max())
    scale = jax.lax.while_loop(lambda s: s < 3, lambda s: s * 2 + 1, scale)
    steps = jax.lax.fori_loop(0, 4, lambda i, s: s + jnp.sin(s), scale)
    return jnp.tanh(x @ params["a"] / scale) @ params["b"] * steps


def used_twice(params, x):
    return jnp.tanh(jnp.tanh(x @ params["a"]) @ params["a"]) @ params["a"].T


def in_bfloat16(params, x):
    x = x.astype(jnp.bfloat16)
    for p in params:
        x = jnp.tanh(x @ p["w"].astype(jnp.bfloat16) + p["b"].astype(jnp.bfloat16))
    return x.astype(jnp.float32)


def embedded(params, x):
    tokens, x = x
    return jnp.tanh((params["table"][tokens] + x) @ params["a"]) @ params["b"]


def dropped(params, x):
    """A random key in a branch has no zeros: the cond is not cut."""
    seed, x = x

    def noisy(x):
        key = jax.random.fold_in(jax.random.key(seed), 1)
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        return jnp.tanh(x @ params["a"]) * mask @ params["b"]

    def other(x):
        return jnp.sin(x @ params["b"])

    return jax.lax.cond(x[0, 0] < 9, jax.checkpoint(noisy), other, x) @ params["c"]


ABC = {name: array(5, 5, seed=i) for i, name in enumerate("abc")}
LAYERS3 = stacked(dense_params())
SHARED = {"layers": LAYERS3, "shared": array(5, 5, seed=7)}
NESTED = {
    "layers": jax.tree.map(lambda a: jnp.stack([a, a + 0.1]), LAYERS3),
    "shared": array(5, 5, seed=7),
}
X = array(4, 5, scale=1.0)
REMATS = {
    "nothing": POLICIES.nothing_saveable,
    "dots": POLICIES.dots_saveable,
    "everything": POLICIES.everything_saveable,
}

SMALL = {
    "mlp": (mlp, dense_params(), X),
    "jitted": (jitted_mlp, dense_params(), X),
    "scan": (scanned(layer), LAYERS3, X),
    "reversed scan": (scanned(layer, reverse=True, unroll=2), LAYERS3, X),
    "shared scan": (shared_scan, SHARED, X),
    "nested scan": (nested_scan, NESTED, X),
    "custom rules": (custom_rules, ABC, X),
    "branches": (branches, ABC, X),
    "branches in a scan": (
        scanned(branches),
        jax.tree.map(lambda a: jnp.stack([a, a.T, a]), ABC),
        X,
    ),
    "loops": (undifferentiated_loops, ABC, X),
    "used twice": (used_twice, ABC, X),
    "bfloat16": (in_bfloat16, dense_params(), X),
    "integers": (embedded, {**ABC, "table": array(7, 5)}, (jnp.arange(4), X)),
    "random keys": (dropped, ABC, (jnp.int32(3), X)),
    **{
        f"remat {name}": (jax.checkpoint(mlp, policy=policy), dense_params(), X)
        for name, policy in REMATS.items()
    },
    **{
        f"remat {name} in a scan": (
            scanned(jax.checkpoint(layer, policy=policy)),
            LAYERS3,
            X,
        )
        for name, policy in REMATS.items()
    },
    "remat around a scan": (jax.checkpoint(shared_scan), SHARED, X),
    "remat in a nested scan": (jax.checkpoint(nested_scan), NESTED, X),
}

STYLES = ["whole", "residuals"]


@pytest.mark.parametrize(
    ("style", "wants"), [("whole", True), ("residuals", True), ("residuals", False)]
)
@pytest.mark.parametrize("name", SMALL)
def test_the_halves_return_what_the_whole_returns(name, style, wants):
    fn, params, x = SMALL[name]
    backward(fn, params, x, style, wants).check()


@pytest.mark.parametrize("name", [name for name in SMALL if "remat" in name])
def test_finishing_the_recomputed_forward_changes_no_result(name):
    fn, params, x = SMALL[name]
    backward(fn, params, x, "residuals", cotangents=True).check()


@pytest.mark.parametrize("wants", [True, False], ids=["wanted", "unwanted"])
@pytest.mark.parametrize("name", SMALL)
def test_no_product_is_computed_twice(name, wants):
    """Products in loops count as often as they run; a branch counts too."""
    fn, params, x = SMALL[name]
    case = backward(fn, params, x, "residuals", wants)
    assert sum(case.products) == count(alive(case.closed), "dot_general")


def alive(closed):
    """The program without calls and without what no output needs."""
    return halve(closed, range(len(closed.jaxpr.outvars))).first


def remade(block):
    return {
        "plain": block,
        **{
            f"remat {name}": jax.checkpoint(block, policy=policy)
            for name, policy in REMATS.items()
        },
    }


@pytest.mark.parametrize("over", [unrolled, scanned])
@pytest.mark.parametrize("name", remade(transformer_block))
def test_a_split_transformer_costs_what_the_whole_costs(name, over):
    """XLA counts a loop's body once (next test); our own count is of all iterations."""
    params = transformer_params()
    params = stacked(params) if over is scanned else params
    fn = over(remade(transformer_block)[name])
    case = backward(fn, params, array(BATCH, SEQ, WIDTH), "residuals", cotangents=True)
    of_xla, of_products = case.check().ratios()
    assert of_xla <= 1.02
    assert of_products == 1


def test_xla_counts_the_body_of_a_loop_once():
    def total(length):
        params = array(length, WIDTH, WIDTH)
        fn = jax.make_jaxpr(lambda p, x: scanned(lambda p, x: x @ p)(p, x))
        x = array(BATCH, WIDTH)
        return flops(fn(params, x), [params, x])

    assert total(8) == pytest.approx(total(2), rel=0.05)


# What crosses.


@pytest.mark.parametrize("fn", [mlp, jitted_mlp, in_bfloat16])
@pytest.mark.parametrize("wants", [True, False])
def test_one_value_a_layer_crosses_in_a_dense_chain(fn, wants):
    """No weight, no activation, no transpose, no cast, no sum for a bias."""
    case = backward(fn, dense_params(), X, "residuals", wants)
    dtype = "bfloat16" if fn is in_bfloat16 else "float32"
    assert case.crossing == [((4, 5), dtype)] * 3


def test_a_rearranged_value_crosses_as_it_was():
    """The transpose, and the cast to float32, run in both halves."""

    def both_ways(params, x):
        y = jnp.cos((x @ params["a"]).astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.sin(jnp.broadcast_to(y.T[:, None], (5, 6, 4)) * params["scale"])

    params = {"a": ABC["a"], "scale": array(5, 6, 4)}
    case = backward(both_ways, params, X, "whole").check()
    assert ((4, 5), "bfloat16") in case.crossing
    assert ((5, 6, 4), "float32") in case.crossing  # the cotangent, times the cosine
    shapes = [(math.prod(shape), dtype) for shape, dtype in case.crossing]
    assert shapes.count((120, "float32")) == 1


def low_rank(params, x):
    left, right = (params[k].astype(jnp.bfloat16) for k in "ab")
    return jnp.tanh(x.astype(jnp.bfloat16) @ (left @ right)).astype(jnp.float32)


@pytest.mark.parametrize("style", STYLES)
def test_what_comes_from_parameters_alone_is_computed_again(style):
    params = {"a": array(5, 2), "b": array(2, 5)}
    case = backward(low_rank, params, X, style).check()
    assert {shape for shape, _ in case.crossing} == {(4, 5)}
    assert {0, 1} <= set(case.halves.needed)
    kept = dataclasses.replace(case, free=())
    assert {(5, 2), (2, 5)} & {shape for shape, _ in kept.check().crossing}


def test_a_recomputed_activation_crosses_and_not_what_it_is_computed_from():
    block = jax.checkpoint(transformer_block)
    fn, params = unrolled(block), [block_params(0)]
    x = array(BATCH, SEQ, WIDTH)
    wide = ((BATCH, SEQ, 4 * WIDTH), "float32")
    lazy = backward(fn, params, x, "residuals")
    eager = backward(fn, params, x, "residuals", cotangents=True)
    assert lazy.crossing.count(wide) == 3
    assert eager.crossing.count(wide) == 2


# Loops and branches.


def scans(closed):
    return [e for e, _ in equations(closed.jaxpr) if e.primitive.name == "scan"]


def carries(closed):
    return [eqn.params["num_carry"] for eqn in scans(closed)]


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize(
    ("name", "of_second"),
    [("scan", [0]), ("shared scan", [1]), ("nested scan", [1, 1])],
)
def test_the_second_scan_carries_only_sums_of_gradients(name, of_second, wants):
    fn, params, x = SMALL[name]
    case = backward(fn, params, x, "residuals", wants)
    assert carries(case.halves.first) == [1] * len(of_second)
    assert carries(case.halves.second) == of_second
    first, second = case.products
    assert first == second


@pytest.mark.parametrize("name", [name for name in SMALL if "scan" in name])
def test_no_scan_stacks_what_it_was_given_stacked(name):
    fn, params, x = SMALL[name]
    case = backward(fn, params, x, "residuals")
    for eqn in scans(case.halves.first):
        num_consts, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
        body = eqn.params["jaxpr"].jaxpr
        given = [*body.invars[:num_consts], *body.invars[num_consts + num_carry :]]
        stacked = body.outvars[num_carry:]
        assert not any(v is g for v in stacked for g in given)
        assert len(set(stacked)) == len(stacked)


def test_a_stack_that_is_an_output_is_not_stacked_again():
    """The cotangent of each step's input is also what the weight's gradient needs."""

    def recurrent(params, x):
        def step(carry, x):
            return jnp.tanh(x + carry @ params["a"]), None

        return jax.lax.scan(step, x[0], x[1])[0]

    x = (X, array(6, 4, 5))
    case = backward(recurrent, ABC, x, "residuals").check()
    assert case.crossing == [((6, 4, 5), "float32")]
    (eqn,) = scans(case.halves.first)
    body = eqn.params["jaxpr"].jaxpr
    assert len(body.outvars) == len(set(body.outvars)) == 2


def test_a_scan_keeps_its_direction_and_unrolling():
    fn, params, x = SMALL["reversed scan"]
    case = backward(fn, params, x, "residuals")
    for half in (case.halves.first, case.halves.second):
        (eqn,) = scans(half)
        # The backward runs against the forward, which is reversed.
        assert not eqn.params["reverse"]
        assert (eqn.params["length"], eqn.params["unroll"]) == (3, 2)


def test_branches_share_the_slots_of_what_crosses():
    """One branch has one value that crosses, the other two of the same type."""

    def fn(params, x):
        def one(x):
            return jnp.tanh(x @ params["a"]) @ params["b"]

        def other(x):
            return jnp.sin(jnp.sin(x @ params["b"]) @ params["a"]) @ params["c"]

        return jax.lax.cond(x[0, 0] > 0, one, other, x)

    for x in (X, -X):
        case = backward(fn, ABC, x, "residuals").check()
        assert case.crossing == [((4, 5), "float32")] * 2
        assert case.products == [5, 5]


# Where no output is wanted.


def test_without_a_wanted_output_the_first_half_is_the_chain():
    assert backward(mlp, dense_params(4), X, "residuals", False).products == [3, 4]
    fn, params, x = SMALL["scan"]
    assert backward(fn, params, x, "residuals", False).products == [3, 3]


def test_with_a_single_parameter_the_first_half_may_be_empty():
    case = backward(lambda w, x: jnp.sin(x @ w), ABC["a"], X, "residuals", False)
    assert case.check().products == [0, 1]
    assert not case.halves.first.jaxpr.eqns


# Effects, and everything that is not cut.


@pytest.mark.parametrize("over", [unrolled, scanned])
def test_an_effect_happens_once_and_in_the_first_half(over):
    seen = []

    @jax.checkpoint
    def noisy(p, x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return layer(p, x)

    params = dense_params()
    params = stacked(params) if over is scanned else params
    case = backward(over(noisy), params, X, "residuals")
    jax.effects_barrier()
    seen.clear()
    run(case.closed, case.args)
    jax.effects_barrier()
    expected = sorted(seen)
    assert len(expected) == 3
    seen.clear()
    case.together()
    jax.effects_barrier()
    np.testing.assert_allclose(sorted(seen), expected, rtol=1e-5)
    assert not case.halves.second.jaxpr.effects


def test_a_recomputed_forward_stays_behind_its_cotangent():
    """Otherwise XLA could recompute all layers first, and hold all they need."""
    fn = unrolled(jax.checkpoint(layer))
    first = backward(fn, dense_params(), X, "residuals").halves.first.jaxpr
    barriers = [e for e in first.eqns if e.primitive.name == "optimization_barrier"]
    assert len(barriers) == 3
    cotangent = first.invars[-1]
    assert any(v is cotangent for v in barriers[0].invars)


def test_an_equation_that_is_not_cut_runs_once():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec()

    def fn(params, x):
        inner = jax.shard_map(
            lambda w, x: jnp.tanh(x @ w), mesh=mesh, in_specs=spec, out_specs=spec
        )
        x = jnp.tanh(inner(params["a"], x) @ params["b"])
        sharding = jax.sharding.NamedSharding(mesh, spec)
        return jax.lax.with_sharding_constraint(x, sharding) @ params["c"]

    case = backward(fn, ABC, X, "residuals").check()
    for name in ("shard_map", "sharding_constraint", "dot_general"):
        total = count(case.halves.first, name) + count(case.halves.second, name)
        assert total == count(alive(case.closed), name) > 0


# The border of `halve`.


def odd_outputs(x, y, n):
    a = jnp.sin(x)
    return a, a, x, jnp.float32(3), a.T * y, n + 1, jnp.zeros(2), n, a.T, x * y


@pytest.mark.parametrize(
    "wanted", [(), (0,), (9, 0, 4), (2, 3), (4,), (5, 7, 9), (6, 8), tuple(range(10))]
)
def test_any_output_can_be_of_either_half(wanted):
    x, y, n = array(3, 3), array(3, 3, seed=1), jnp.arange(3)
    closed = jax.make_jaxpr(jax.jit(odd_outputs))(x, y, n)
    case = Case(closed, [x, y, n], wanted, ()).check()
    assert len(case.halves.first.jaxpr.outvars) >= len(wanted)
    assert list(case.halves.needed) == sorted(case.halves.needed)


def test_constants_go_where_they_are_used():
    table, other = np.arange(25.0, dtype=np.float32).reshape(5, 5), np.eye(5) * 2

    def fn(params, x):
        block = jax.jit(lambda w, x: jnp.tanh(x @ w * (x[:, :1] @ table[:1])))
        x = block(params["b"], block(params["a"], x))
        return x @ jnp.asarray(other, jnp.float32)

    case = backward(fn, ABC, X, "whole").check()
    assert len(case.halves.first.consts) <= len(case.closed.consts) + 2
    for half in (case.halves.first, case.halves.second):
        read = {v for e in half.jaxpr.eqns for v in e.invars if isinstance(v, jex.Var)}
        assert set(half.jaxpr.constvars) <= read


@pytest.mark.parametrize("name", ["branches in a scan", "remat in a nested scan"])
def test_the_same_program_is_always_cut_in_the_same_way(name):
    fn, params, x = SMALL[name]
    one, two = (backward(fn, params, x, "residuals").halves for _ in range(2))
    assert str(one.first) == str(two.first)
    assert str(one.second) == str(two.second)
    assert (one.needed, one.num_crossing) == (two.needed, two.num_crossing)
