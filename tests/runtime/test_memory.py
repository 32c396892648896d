"""What a step holds on its devices: in-flight microbatches times residuals (C16)."""

import gc
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import Pipeline, Policy, split
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import devices, pipeline
from tests.runtime import scripted, toys

ROWS, WIDE, NARROW, DEPTH = 64, 64, 4, 5
LAYER_BYTES = ROWS * WIDE * 4
PAYLOAD_BYTES = ROWS * NARROW * 4


def wide(params, inputs, feed):
    """A stage whose residuals dominate: narrow payloads, `DEPTH` wide layers."""
    x = feed["x"] if inputs is None else inputs
    for w in params:
        x = jnp.tanh(x @ w)
    return x


def wide_loss(params, inputs, feed):
    return 0.5 * jnp.sum((wide(params, inputs, feed) - feed["t"]) ** 2)


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="module")
def wide_chain():
    """A compiled chain of four, and its parameters in place."""
    draw = np.random.default_rng(0)
    widths = [NARROW, *[WIDE] * DEPTH, NARROW]
    shapes = list(itertools.pairwise(widths))
    host = [
        [draw.normal(size=shape).astype(np.float32) / 8 for shape in shapes]
        for _ in range(4)
    ]
    chain = Pipeline([wide, wide, wide, wide_loss], host)
    params = chain.place(host)
    chain.run(params, microbatches_of(4))
    return chain, params


def microbatches_of(count):
    draw = np.random.default_rng(1)
    x = draw.normal(size=(count * ROWS, NARROW)).astype(np.float32)
    return split({"x": x, "t": x[::-1]}, count)


def residual_bytes(chain):
    """What a microbatch holds at each stage after F and after B, say the programs."""
    graph = chain.graph([()])
    feeds = chain._prepare(microbatches_of(1), True)[1]
    (plan,) = chain.compiler.plans(graph, pipeline._layouts(feeds))
    return [(p.saved.num_bytes, p.kept.num_bytes) for p in plan]


@pytest.fixture
def watch(monkeypatch):
    """Samples live bytes and, by stage, how many microbatches are between F and B, and
    between B and W, after every launch.
    """
    samples = []

    def use(of, *args):
        class Watched(of):
            def launched(self, task, flag):
                super().launched(task, flag)
                self.kinds = getattr(self, "kinds", [Counter() for _ in range(4)])
                self.kinds[task.stage][task.kind] += 1
                is_split = self.trace.graph.is_split
                between = tuple(
                    (c[Kind.F] - c[Kind.B], is_split * (c[Kind.B] - c[Kind.W]))
                    for c in self.kinds
                )
                samples.append((live_bytes(), between))

        monkeypatch.setattr(
            pipeline,
            "RealDevices",
            lambda graph, *rest: Watched(graph, *args or rest),
        )
        return samples

    return use


def kept_by_jax(fn, params, x):
    """Bytes of what `jax.vjp` itself keeps, each array once, parameters apart."""
    _, pullback = jax.vjp(fn, params, x)
    by_params = {id(leaf) for leaf in jax.tree.leaves(params)}
    kept = {id(a): a.nbytes for a in jax.tree.leaves(pullback) if a.ndim}
    return sum(size for key, size in kept.items() if key not in by_params)


def test_residuals_are_those_of_jax_each_once_and_no_parameter(wide_chain):
    chain, params = wide_chain
    feed = jax.tree.map(jnp.asarray, microbatches_of(1)[0])
    x = jax.device_put(feed["x"], jax.devices()[0])
    inner = kept_by_jax(lambda p, x: wide(p, x, feed), params[0], x)
    last = kept_by_jax(
        lambda p, x: wide_loss(p, x, feed), jax.device_put(params[3], x.device), x
    )
    chain.policy = Policy()
    assert residual_bytes(chain) == [(inner, 0), (inner, 0), (inner, 0), (last, 0)]
    assert inner > 2 * DEPTH * LAYER_BYTES  # so that payloads are less than 1 %


def test_after_b_a_stage_holds_its_layers_inputs_and_their_cotangents(wide_chain):
    """A layer keeps tanh(x @ w) and one array more for B; for W its input, which is the
    layer before's output, and the cotangent that B computed.
    """
    chain, _ = wide_chain
    chain.policy = Policy("bfw")
    each = residual_bytes(chain)
    for forward, backward in each[:3]:
        # DEPTH inputs of which one is narrow, DEPTH + 1 cotangents likewise.
        layers = DEPTH + DEPTH
        assert backward == layers * LAYER_BYTES + 2 * PAYLOAD_BYTES
        assert backward < forward


@pytest.mark.parametrize(
    "policy",
    [
        Policy("bf"),
        Policy("gpipe"),
        Policy("bf", in_flight_limit=2),
        Policy("1f1b", "fixed"),
        Policy("bfw"),
        Policy("bfw", weight_limit=1),
        Policy("bf", deterministic=True),
    ],
    ids=["bf", "gpipe", "limit_2", "1f1b", "bfw", "weight_limit_1", "deterministic"],
)
def test_c16_a_step_holds_its_in_flight_microbatches_and_nothing_else(
    wide_chain, watch, policy
):
    """Live bytes after every launch, to 2 %: parameters, accumulators, residuals."""
    chain, params = wide_chain
    chain.policy = policy
    microbatches = microbatches_of(8)
    each = residual_bytes(chain)
    gc.collect()
    before = live_bytes()  # parameters, and whatever else lives in this test session
    param_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    samples = watch(devices.RealDevices)
    trace = chain.run(params, microbatches).trace
    assert len(samples) == (96 if policy.is_split else 64)
    for live, between in samples:
        held = sum(
            n * size
            for counts, sizes in zip(between, each, strict=True)
            for n, size in zip(counts, sizes, strict=True)
        )
        expected = param_bytes + param_bytes + held
        assert live - before + param_bytes == pytest.approx(expected, rel=0.02)
    most = [
        max(np.dot(between[s], each[s]) for _, between in samples) for s in range(4)
    ]
    assert trace.peak_bytes() == most


@pytest.mark.parametrize(
    "policy",
    [
        Policy("1f1b", "fixed"),
        Policy("f_priority", in_flight_limit=4),
        Policy("zb_h1", "fixed"),
    ],
    ids=["1f1b", "f_priority", "zb_h1"],
)
def test_c16_the_peak_does_not_depend_on_the_number_of_microbatches(
    wide_chain, watch, policy
):
    """M = 8 and M = 64 at one microbatch size and one limit."""
    chain, params = wide_chain
    chain.policy = policy
    peaks = []
    for count in (8, 64):
        microbatches = microbatches_of(count)
        gc.collect()
        before = live_bytes()
        samples = watch(scripted.Scripted, lambda events: events[0])
        samples.clear()
        chain.run(params, microbatches)
        peaks.append(
            (
                max(live - before for live, _ in samples),
                np.max([n for _, n in samples], 0),
            )
        )
    (few, few_in_flight), (many, many_in_flight) = peaks
    assert few_in_flight.tolist() == many_in_flight.tolist()
    assert few_in_flight[0][0] == 4
    assert many == pytest.approx(few, rel=0.02)


@pytest.mark.parametrize("hint", ["bf", "bfw", "bfw_memory"])
def test_a_limit_in_bytes_holds_on_the_devices_and_is_used(wide_chain, watch, hint):
    """Room for three microbatches and a half: three, and the same gradients."""
    chain, params = wide_chain
    chain.policy = Policy(hint)
    microbatches = microbatches_of(8)
    expected = chain.run(params, microbatches)
    largest = max(map(max, residual_bytes(chain)))
    limit = 3.5 * largest
    chain.policy = Policy(hint, memory_limit_gb=limit / 2**30)
    gc.collect()
    before = live_bytes()
    samples = watch(devices.RealDevices)
    result = chain.run(params, microbatches)
    assert 2.9 * largest <= max(result.trace.peak_bytes()) <= limit
    param_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    most = max(live for live, _ in samples) - before
    assert most <= param_bytes + 1.02 * sum(result.trace.peak_bytes())
    toys.assert_close(list(result.grads), list(expected.grads))


def test_a_limit_below_one_microbatch_is_refused_before_anything_compiles():
    one = toys.TOYS["one_each"].pipeline(policy=Policy("bfw", memory_limit_gb=1e-8))
    params = toys.TOYS["one_each"].params()
    with pytest.raises(
        ConfigError, match="cannot hold the residuals of one microbatch"
    ):
        one.run(params, toys.microbatches_of(4))
    assert one.compiler.num_programs == 0


def test_accumulators_are_donated_from_one_backward_to_the_next():
    """So there is one of each, whatever the number of launched backwards."""
    (one,) = toys.TOYS["single_stage"].params()
    chain = toys.compiled("single_stage")
    chain.policy = Policy()
    graph, feeds = chain._prepare(toys.microbatches_of(1), True)
    ((programs,),) = chain.compiler.plans(graph, pipeline._layouts(feeds))
    params = jax.tree.leaves(jax.device_put(one))
    rest = [jax.device_put(leaf) for leaf in feeds[0][0][0]]
    outputs, kept, _ = programs.forward(params, rest)
    pool = [*rest, *outputs, *kept]
    held = programs.saved.of(pool)
    zeros = [jnp.zeros_like(leaf) for leaf in params]
    summed, _, _ = programs.backward(zeros, params, held, [[jnp.float32(1)]])
    assert all(array.is_deleted() for array in zeros)
    assert not any(array.is_deleted() for array in [*params, *pool, *summed])


def test_c16_nothing_is_left_but_the_results(wide_chain):
    chain, params = wide_chain
    chain.policy = Policy()
    microbatches = microbatches_of(8)
    gc.collect()
    before = live_bytes()
    result = chain.run(params, microbatches)
    num_flags = 2 * 4 * 8
    held = sum(leaf.nbytes for leaf in jax.tree.leaves((result.grads, result.aux)))
    assert live_bytes() - before == held + num_flags
    assert held == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    del result
    assert live_bytes() == before


def test_c16_fifty_steps_do_not_grow():
    chain, params = toys.compiled("one_each"), toys.TOYS["one_each"].params()
    chain.policy = Policy()
    params = chain.place(params)
    microbatches = toys.microbatches_of(4)
    chain.run(params, microbatches)
    gc.collect()
    before = live_bytes(), len(jax.live_arrays()), chain.compiler.num_programs
    for _ in range(50):
        chain.run(params, microbatches)
        found = live_bytes(), len(jax.live_arrays()), chain.compiler.num_programs
        assert found == before
