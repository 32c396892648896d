"""`deterministic=True`: bitwise the same whatever the hint, delays, launch-ahead."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import Pipeline, Policy
from rrfp_jax.core.events import Arrived
from tests.runtime import scripted, toys

COUNT, NUM_STEPS, NUM_PATTERNS = 4, 10, 20
CHAIN = [
    ("bf", "readiness"),
    ("bfw", "readiness"),
    ("b_priority", "readiness"),
    ("1f1b", "fixed"),
]
DAGS = [("bf", "readiness"), ("bfw", "readiness"), ("gpipe", "fixed")]
LARGE = [1e8, 1.0, -1e8]  # sums to 0 in this order, and to 1 or 0 in others


def trained(name, policy, pattern, use_script):
    """Returns the parameters after ten steps, each under delays of its own."""
    pipeline, params = toys.compiled(name), toys.TOYS[name].params()
    pipeline.policy = policy
    for step in range(NUM_STEPS):
        use_script(scripted.at_random(f"{pattern}/{step}"))
        microbatches = toys.microbatches_of(COUNT, seed=step)
        _, grads = pipeline.loss_and_grad(params, microbatches, 1 / 8)
        params = toys.sgd(params, grads, 0.3)
    return params


@pytest.mark.parametrize("part", range(4))
def test_parameters_after_ten_steps_are_bitwise_equal_on_a_chain(part, use_script):
    """20 delay patterns, four hints, launch-ahead 1 and 3, all with split programs."""
    expected = None
    for pattern in range(part, NUM_PATTERNS, 4):
        for (hint, order), ahead in itertools.product(CHAIN, (1, 3)):
            policy = Policy(hint, order, deterministic=True, launch_ahead=ahead)
            found = trained("one_each", policy, pattern, use_script)
            expected = expected or found
            toys.assert_same_bits(found, expected)


@pytest.mark.parametrize(
    "name", ["v_shaped", "interleaved", "skip_edges", "two_towers_that_join"]
)
def test_they_are_on_other_topologies(name, use_script):
    expected = None
    for pattern, (hint, order) in itertools.product(range(3), DAGS):
        policy = Policy(hint, order, deterministic=True, weight_limit=pattern)
        found = trained(name, policy, pattern, use_script)
        expected = expected or found
        toys.assert_same_bits(found, expected)


def test_they_are_the_same_for_every_placement(use_script):
    """The same stage programs on a chain, interleaved and in a V."""
    policy = Policy("bfw", deterministic=True)
    found = [
        trained(name, policy, 0, use_script)
        for name in ("one_each", "interleaved", "v_shaped", "two_stages_a_rank")
    ]
    for other in found[1:]:
        toys.assert_same_bits(found[0], other)


def test_without_it_the_delays_show(use_script):
    """Seen to fail: arrival order is summation order."""
    policy = Policy("bfw")
    found = [trained("one_each", policy, p, use_script) for p in range(4)]
    distinct = {np.concatenate([p["w"] for p in each]).tobytes() for each in found}
    assert len(distinct) > 1


def product(w, _, feed):
    """Multiplies; its gradient is x, whatever w."""
    return w * feed["x"]


def total(w, h, _):
    return w * jnp.sum(h)


@pytest.fixture(scope="module")
def sum_of_large():
    return Pipeline([product, total], [np.float32(1), np.float32(1)])


def in_turn(order):
    """Delivers forwards at once, and cotangents in the given order of microbatches."""

    def choose(events):
        cotangents = [e for e in events if isinstance(e, Arrived) and e.to == 0]
        others = [e for e in events if e not in cotangents]
        if others:
            return others[0]
        return min(cotangents, key=lambda e: order.index(e.source.microbatch))

    return choose


@pytest.mark.parametrize("hint", ["bf", "bfw", "b_priority", "f_priority"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_c20_the_sum_is_that_of_index_order(sum_of_large, hint, order, use_script):
    sum_of_large.policy = Policy(hint, deterministic=True, launch_ahead=3)
    use_script(in_turn(order))
    params = [np.float32(1), np.float32(1)]
    _, grads = sum_of_large.loss_and_grad(
        params, [{"x": np.float32([x])} for x in LARGE]
    )
    assert float(grads[0]) == 0.0


def test_c20_otherwise_it_is_that_of_arrival_order(sum_of_large, use_script):
    """The control: the large ones first cancel out, and leave the 1."""
    sum_of_large.policy = Policy("bf", split="always")
    use_script(in_turn((0, 2, 1)))
    params = [np.float32(1), np.float32(1)]
    _, grads = sum_of_large.loss_and_grad(
        params, [{"x": np.float32([x])} for x in LARGE]
    )
    assert float(grads[0]) == 1.0
