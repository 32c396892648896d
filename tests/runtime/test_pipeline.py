"""The library entry: what it accepts, and what it says of what it does not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import Pipeline, Stage, split
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import placing, stage
from tests.runtime import toys

W = {"w": np.float32(2)}


def scaled(params, inputs, feed):
    return params["w"] * feed["x"]


def total(params, inputs, feed):
    return jnp.sum(params["w"] * inputs)


def two(params=(W, W), first=scaled, last=total, **kwargs):
    return Pipeline([first, last], list(params), **kwargs)


ONES = [{"x": np.ones(2, np.float32)}]


def test_split_gives_the_first_microbatches_the_extra_rows():
    batch = {"x": np.arange(8), "y": [np.arange(16).reshape(8, 2)]}
    parts = split(batch, 3)
    assert [part["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [part["y"][0].shape for part in parts] == [(3, 2), (3, 2), (2, 2)]


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        ({"x": np.zeros(3), "y": np.zeros(4)}, r"\[3, 4\]"),
        ({"x": np.zeros(3)}, r"\[3\]"),
        ({}, r"\[\]"),
    ],
)
def test_split_refuses_rows_that_cannot_be_cut(batch, rows):
    with pytest.raises(ConfigError, match=f"arrays of {rows} rows .* into 4"):
        split(batch, 4)


def test_results_hold_the_loss_of_each_microbatch_and_its_scale():
    pipeline = two(last=lambda p, i, f: (jnp.sum(p["w"] * i), {"x": f["x"], "n": 3}))
    microbatches = split({"x": np.float32([1, 2, 5])}, 3)
    result = pipeline.run([W, W], microbatches, scale=0.5)
    assert result.losses == (4.0, 8.0, 20.0)
    assert result.loss == 16.0
    assert [float(aux["x"][0]) for aux in result.aux] == [1, 2, 5]
    assert [aux["n"] for aux in result.aux] == [3, 3, 3]
    assert [float(tree["w"]) for tree in result.grads] == [8.0, 8.0]
    assert result.grads[0]["w"].devices() == {jax.devices()[0]}
    assert result.grads[1]["w"].devices() == {jax.devices()[1]}


def test_parameters_may_lie_anywhere_and_are_left_alone():
    """On the host, on another rank's device, or in place; the caller's stay valid."""
    pipeline = two()
    elsewhere = [jax.device_put(W, jax.devices()[5]), jax.device_put(W)]
    for params in ([W, W], elsewhere, pipeline.place([W, W])):
        for _ in range(2):
            assert pipeline.loss_and_grad(params, ONES)[0] == 8.0
        assert [float(tree["w"]) for tree in params] == [2.0, 2.0]


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.float16, np.bool_])
def test_feeds_of_wide_types_are_taken_as_jax_takes_them(dtype):
    assert two().loss_and_grad([W, W], [{"x": np.ones(2, dtype)}])[0] == 8.0


def test_a_key_of_jax_random_is_a_feed():
    def noisy(params, inputs, feed):
        return params["w"] * jax.random.normal(feed["key"], (3,))

    key = jax.random.key(3)
    loss, grads = two(first=noisy).loss_and_grad([W, W], [{"key": key}])
    expected = float(np.sum(jax.random.normal(key, (3,))))
    assert loss == pytest.approx(4 * expected, rel=1e-6)
    assert float(grads[0]["w"]) == pytest.approx(2 * expected, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pipeline([scaled, total], [W]), "1 parameter trees were given for 2"),
        (lambda: two(edges=((1, 0),)), "edge 1 -> 0"),
        (lambda: two(edges=((0, 1), (0, 1))), "given twice"),
        (lambda: two(edges=()), "visits stage 0, whose output nobody reads"),
        (lambda: two(placement=(0,)), "names 1 stages; the pipeline has 2"),
        (lambda: two(placement=(0, 2)), "Number the ranks from 0 without gaps"),
        (lambda: two(tied=[((0, "v"), (1, "w"))]), r"\(0, 'v'\) does not exist"),
        (
            lambda: two([W, {"w": np.ones(2)}], tied=[((0, "w"), (1, "w"))]),
            "tied parameters are unlike",
        ),
        (lambda: two(first=Stage(scaled, frozen=["v"])), r"frozen keys \['v'\]"),
        (lambda: two(last=scaled).compile(ONES), "must return a scalar loss"),
        (lambda: two().run([W, W], []), "0 microbatches"),
        (
            lambda: two(skips=lambda m: (1,)).run([W, W], ONES),
            "microbatch 0 cannot skip stage 1",
        ),
    ],
)
def test_what_does_not_fit_together_is_a_config_error(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_tied_parameter_may_lie_deep_in_lists_and_dicts():
    params = [{"a": [np.float32(2), np.float32(9)]}, {"b": ({"c": np.float32(2)},)}]
    pipeline = Pipeline(
        [
            lambda p, i, f: p["a"][0] * p["a"][1] * f["x"],
            lambda p, i, f: jnp.sum(i * p["b"][0]["c"]),
        ],
        params,
        tied=[((0, "a", 0), (1, "b", 0, "c"))],
    )
    _, grads = pipeline.loss_and_grad(params, ONES)
    assert jax.tree.structure(list(grads)) == jax.tree.structure(params)
    assert float(grads[0]["a"][0]) == float(grads[1]["b"][0]["c"]) == 36 + 36
    assert float(grads[0]["a"][1]) == 8.0


def test_three_copies_are_added_up_and_stay_bitwise_equal():
    toy = toys.TOYS["three"]
    params = [toy.params()[0]] * 3
    tied = toy.pipeline(tied=[tuple((s, key) for s in range(3)) for key in ("w", "b")])
    _, grads = tied.loss_and_grad(params, toys.microbatches_of(2))
    _, parts = toys.reference(toy, params, toys.batch_of(4))
    for key in ("w", "b"):
        toys.assert_same_bits(grads[0][key], grads[1][key])
        toys.assert_same_bits(grads[0][key], grads[2][key])
        toys.assert_close(grads[0][key], sum(part[key] for part in parts))


def test_flatten_and_unflatten_are_inverse():
    tree = {"a": np.ones(2), "n": 7, "none": None, "s": "text", "b": [np.int8(1)]}
    arrays, layout = stage.flatten(tree)
    assert [a.shape for a in arrays] == [(2,), ()]
    assert [value for _, value, _ in layout.statics] == [7, "text"]
    back = layout.unflatten(arrays)
    assert back == tree
    assert hash(layout) == hash(stage.flatten(back)[1])


def test_parameters_may_hold_a_static_leaf():
    params = [{"a_number": 3, "w": np.float32(2)}, W]
    grads = two(params).loss_and_grad(params, ONES)[1]
    assert float(grads[0]["w"]) == 4.0


def test_a_stage_with_only_integer_parameters_has_no_backward():
    params = [{"w": np.int32(2)}, W]
    ran = two(params).run(params, ONES).trace.graph.tasks()
    assert not [t for t in ran if t.stage == 0 and t.kind is Kind.B]


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
def test_wide_and_canonical_types_share_a_program(dtype):
    pipeline, x = two(), np.ones(2, dtype)
    pipeline.compile([{"x": jnp.asarray(x)}])
    assert pipeline.num_uncompiled([{"x": x}]) == 0


def test_a_key_of_jax_random_is_a_payload():
    def first(params, inputs, feed):
        return params["w"] * feed["x"], feed["key"]

    def last(params, inputs, feed):
        return jnp.sum(params["w"] * inputs[0] * jax.random.normal(inputs[1], (2,)))

    microbatch = ONES[0] | {"key": jax.random.key(0)}
    two(first=first, last=last).loss_and_grad([W, W], [microbatch])


def test_debug_prints_of_a_trained_stage_are_seen(capfd):
    def chatty(params, inputs, feed):
        jax.debug.print("x is {}", feed["x"][0])
        return params["w"] * feed["x"]

    two(first=chatty).loss_and_grad([W, W], ONES)
    jax.effects_barrier()
    assert "x is 1.0" in capfd.readouterr().out


@pytest.mark.parametrize(
    "make",
    [
        lambda: two(ranks=placing.make_ranks(1)),
        lambda: two(partition=[None]),
        lambda: two(tied=[((7, "w"), (1, "w"))]),
        lambda: two(first=Stage(scaled, frozen=True), tied=[((0, "w"), (1, "w"))]).run(
            [W, W], ONES
        ),
        lambda: two(tied=[((0, "w"), (0, "w"))]),
        lambda: two(first=Stage(scaled, frozen="w")),
        lambda: two().run([W], ONES),
        lambda: two().run([{"v": W["w"]}, W], ONES),
        lambda: two().run([{"w": np.ones(3, np.float32)}, W], ONES),
        lambda: split({"x": np.zeros(4), "n": 7}, 2),
    ],
    ids=[
        "fewer_ranks_than_the_placement",
        "partition_for_fewer_stages",
        "tied_stage_that_does_not_exist",
        "tied_to_a_frozen_copy",
        "tied_to_itself",
        "frozen_is_one_string",
        "fewer_trees_than_declared",
        "keys_that_were_not_declared",
        "a_shape_that_was_not_declared",
        "a_number_to_split",
    ],
)
def test_these_should_be_config_errors_too(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.filterwarnings("error::DeprecationWarning")
def test_tracing_warns_of_nothing():
    two().compile(ONES)
