"""One norm over all stages, exact clipping, tied copies counted once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models.layer import Layer
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.replicas import Replicas
from rrfp_jax.train.config import OptimizerConfig
from rrfp_jax.train.optimizer import Optimizer, Trees, schedule
from rrfp_jax.train.stages import Cut

# Without decay and without momentum the first moment is the clipped gradient itself.
CONFIG = OptimizerConfig(learning_rate=0.5, weight_decay=0.0, b1=0.0)


def layer(name: str) -> Layer:
    return Layer(
        name=name,
        init=lambda key: {},
        apply=lambda params, carry, feed: carry,
        feed_keys=frozenset(),
        flops=lambda shape: 0.0,
        partition=lambda params: {},
    )


def cut_of(*stages: str, frozen: str = "", tied: tuple = ()) -> Cut:
    """Returns a cut with one layer a stage."""
    return Cut(
        layers=tuple((layer(name),) for name in stages),
        tower_of=("language",) * len(stages),
        edges=(),
        placement=tuple(range(len(stages))),
        frozen=frozenset(frozen.split()),
        tied=tied,
    )


def updated(
    cut: Cut, grads: Trees, config: OptimizerConfig = CONFIG
) -> tuple[float, Trees, Trees]:
    """Returns the norm, and parameters (from 1) and states after one update."""
    ranks = placing.make_ranks(len(cut.layers))
    place = [rank.replicated for rank in ranks]
    grads = [jax.device_put(g, where) for g, where in zip(grads, place, strict=True)]
    params = [jax.tree.map(jnp.ones_like, tree) for tree in grads]
    optimizer = Optimizer(config, 10, cut, [Replicas((rank,)) for rank in ranks])
    state = optimizer.init(params)
    optimizer.compile(params, state)
    reduced = optimizer.reduce({0: grads})
    norm = optimizer.norm(reduced)
    return norm, *optimizer.update(params, state, reduced, norm)


def moment(states: Trees, stage: int, name: str) -> np.ndarray:
    return np.asarray(states[stage][name][0].mu["w"])


def test_c09_clipping_is_by_the_norm_of_all_stages():
    grads = [{"a": {"w": jnp.array([3.0, 0.0])}}, {"b": {"w": jnp.array([0.0, 4.0])}}]
    norm, _, states = updated(cut_of("a", "b"), grads)
    assert norm == 5.0
    np.testing.assert_array_equal(moment(states, 0, "a"), np.float32([0.6, 0]))
    np.testing.assert_array_equal(moment(states, 1, "b"), np.float32([0, 0.8]))


def test_a_gradient_within_the_norm_is_not_scaled():
    grads = [{"a": {"w": jnp.array([0.3, 0.0])}}, {"b": {"w": jnp.array([0.0, 0.4])}}]
    norm, _, states = updated(cut_of("a", "b"), grads)
    assert norm == pytest.approx(0.5)
    np.testing.assert_array_equal(moment(states, 0, "a"), np.float32([0.3, 0]))


def test_c04_a_frozen_stage_is_left_out_of_norm_update_and_state():
    grads = [{"a": {"w": jnp.array([30.0])}}, {"b": {"w": jnp.array([4.0])}}]
    norm, params, states = updated(cut_of("a", "b", frozen="a"), grads)
    assert norm == 4.0
    np.testing.assert_array_equal(params[0]["a"]["w"], [1.0])
    assert states[0] == {}
    np.testing.assert_array_equal(moment(states, 1, "b"), [1.0])


def test_c05_a_tied_gradient_counts_once_and_moves_both_copies_alike():
    total = jnp.array([0.0, -0.268941])  # of both copies, as `ties` leaves it
    grads = [{"embed": {"w": total}}, {"head": {"w": jnp.copy(total)}}]
    tied = (((0, "embed", "w"), (1, "head", "w")),)
    norm, params, _ = updated(cut_of("embed", "head", tied=tied), grads)
    assert norm == pytest.approx(0.268941, rel=1e-6)
    moved = [np.asarray(params[0]["embed"]["w"]), np.asarray(params[1]["head"]["w"])]
    np.testing.assert_array_equal(*moved)
    assert moved[0][1] > 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_not_finite_has_no_norm(value: float):
    cut = cut_of("a", "b")
    ranks = placing.make_ranks(2)
    grads = [
        jax.device_put({name: {"w": jnp.array([x])}}, rank.replicated)
        for name, x, rank in zip("ab", [1.0, value], ranks, strict=True)
    ]
    optimizer = Optimizer(CONFIG, 10, cut, [Replicas((rank,)) for rank in ranks])
    optimizer.compile(grads, optimizer.init(grads))
    assert not np.isfinite(optimizer.norm(grads))


def test_only_matrices_decay():
    grads = [{"a": {"w": jnp.zeros((1, 1)), "bias": jnp.zeros(1)}}]
    config = dataclasses.replace(CONFIG, weight_decay=0.1)
    _, params, _ = updated(cut_of("a"), grads, config)
    np.testing.assert_allclose(params[0]["a"]["w"], [[1 - 0.5 * 0.1]])
    np.testing.assert_array_equal(params[0]["a"]["bias"], [1.0])


def test_the_rate_rises_linearly_and_falls_by_a_cosine():
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, final_fraction=0.2)
    rate = schedule(config, 12)
    found = [float(rate(step)) for step in (0, 2, 4, 8, 12)]
    assert found == pytest.approx([0, 0.5, 1, 0.6, 0.2])


def test_without_warm_up_the_first_step_has_the_full_rate():
    rate = schedule(OptimizerConfig(learning_rate=1.0, final_fraction=0.2), 10)
    assert float(rate(0)) == 1.0
