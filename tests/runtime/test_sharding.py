"""Data and tensor parallelism inside a rank: the same numbers, and cut as promised."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rrfp_jax import Pipeline, Policy, split
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import pipeline, placing
from tests.runtime import toys

WIDE = 8


def mlp(params, inputs, feed):
    x = feed["x"] if inputs is None else inputs
    return jnp.tanh(x @ params["up"]) @ params["down"]


def loss(params, inputs, feed):
    return jnp.sum((mlp(params, inputs, feed) - feed["t"]) ** 2)


COLUMNS, ROWS = PartitionSpec(None, "model"), PartitionSpec("model", None)
SPECS = {"up": COLUMNS, "down": ROWS}
LAYOUTS = {
    "data": (2, 1, None),
    "model": (1, 2, SPECS),
    "data_and_model": (2, 2, SPECS),
    "four_replicas": (4, 1, None),
    "replicated_over_model": (2, 2, None),
    "one_spec_left_out": (1, 4, {"up": None, "down": ROWS}),
}


@pytest.fixture(scope="module")
def params():
    draw = np.random.default_rng(0)
    return [
        {
            "up": draw.normal(size=(4, WIDE)).astype(np.float32),
            "down": draw.normal(size=(WIDE, 4)).astype(np.float32),
        }
        for _ in range(2)
    ]


@pytest.fixture(scope="module", params=LAYOUTS)
def sharded(request, params):
    data, model, specs = LAYOUTS[request.param]
    return Pipeline(
        [mlp, loss],
        params,
        ranks=placing.make_ranks(2, data, model),
        partition=[specs, specs],
    )


def batch_of(rows):
    return toys.batch_of(rows)


def expected_of(params, rows):
    def total(params):
        return toys.run_stages([mlp, loss], ((0, 1),), params, batch_of(rows)) / rows

    return jax.value_and_grad(total)(params)


def test_sharded_ranks_have_the_loss_and_gradients_of_one_process(sharded, params):
    found = sharded.loss_and_grad(params, split(batch_of(16), 2), 1 / 16)
    toys.assert_close((found[0], list(found[1])), expected_of(params, 16))


def test_rows_that_do_not_divide_over_the_replicas_are_replicated(params):
    """Microbatches of 3 rows on two replicas."""
    ranks = placing.make_ranks(2, data=2, model=2)
    cut = Pipeline([mlp, loss], params, ranks=ranks, partition=[SPECS, SPECS])
    found = cut.loss_and_grad(params, split(batch_of(12), 4), 1 / 12)
    toys.assert_close((found[0], list(found[1])), expected_of(params, 12))


def test_gradients_lie_as_their_parameters_do(sharded, params):
    _, grads = sharded.loss_and_grad(sharded.place(params), split(batch_of(16), 2))
    for tree, shardings in zip(grads, sharded.parameters.sharding_trees, strict=True):
        for grad, sharding in zip(
            jax.tree.leaves(tree), jax.tree.leaves(shardings), strict=True
        ):
            assert grad.sharding.is_equivalent_to(sharding, grad.ndim)


def test_activations_cotangents_and_residuals_stay_cut_over_data(params, sent):
    ranks = placing.make_ranks(2, data=2, model=2)
    cut = Pipeline([mlp, loss], params, ranks=ranks, partition=[SPECS, SPECS])
    cut.run(params, split(batch_of(16), 2))
    assert len(sent) == 4
    for message, (payload,) in sent.items():
        rank = ranks[message.to]
        assert payload.sharding == NamedSharding(rank.mesh, PartitionSpec("data"))
        assert {shard.data.shape for shard in payload.addressable_shards} == {(4, 4)}
        assert message.source.kind in Kind
    graph, feeds = cut._prepare(split(batch_of(16), 2), True)
    for programs in cut.compiler.plans(graph, pipeline._layouts(feeds))[0]:
        _, kept, _ = programs.forward.out_info
        kept_shardings = programs.forward.output_shardings[1]
        assert kept
        for aval, sharding in zip(kept, kept_shardings, strict=True):
            # (8, 8) activations of the hidden layer: rows over data, units over model
            assert sharding.shard_shape(aval.shape) == (4, 4), aval.shape


def test_parameters_are_placed_by_their_specs(params):
    ranks = placing.make_ranks(2, data=2, model=2)
    cut = Pipeline([mlp, loss], params, ranks=ranks, partition=[SPECS, None])
    placed = cut.place(params)
    assert placed[0]["up"].sharding == NamedSharding(ranks[0].mesh, COLUMNS)
    assert placed[0]["down"].sharding == NamedSharding(ranks[0].mesh, ROWS)
    assert placed[1]["up"].sharding == NamedSharding(ranks[1].mesh, PartitionSpec())
    assert placed[0]["up"].sharding.device_set == set(jax.devices()[:4])
    again = cut.place(placed)
    assert again[0]["up"] is placed[0]["up"]


def test_ranks_with_different_numbers_of_devices_exchange_payloads(params):
    """Data 2 sends to data 1 x model 2, and back."""
    devices = jax.devices()
    ranks = [
        *placing.make_ranks(1, data=2, devices=devices[:2]),
        *placing.make_ranks(1, data=1, model=2, devices=devices[2:4]),
    ]
    mixed = Pipeline([mlp, loss], params, ranks=ranks, partition=[None, SPECS])
    found = mixed.loss_and_grad(params, split(batch_of(16), 2), 1 / 16)
    toys.assert_close((found[0], list(found[1])), expected_of(params, 16))


def test_two_stages_on_one_sharded_rank_hand_over_without_a_copy(params, sent):
    ranks = placing.make_ranks(1, data=2)
    together = Pipeline(
        [mlp, loss], params, placement=(0, 0), ranks=ranks, policy=Policy("gpipe")
    )
    found = together.loss_and_grad(params, split(batch_of(16), 2), 1 / 16)
    toys.assert_close((found[0], list(found[1])), expected_of(params, 16))
    assert sent == {}


def test_too_few_devices_is_a_config_error_with_the_product():
    with pytest.raises(ConfigError, match=r"needs 12 devices; there are 8") as error:
        placing.make_ranks(3, data=2, model=2)
    assert "mesh.num_cpu_devices=12" in str(error.value)


@pytest.mark.parametrize(
    ("shape", "is_cut"), [((4, 3), True), ((3, 4), False), ((), False), ((0, 2), False)]
)
def test_values_are_cut_where_the_rows_divide(shape, is_cut):
    (rank,) = placing.make_ranks(1, data=2)
    assert rank.of_value(shape) == (rank.split if is_cut else rank.replicated)


def test_a_rank_of_one_device_needs_no_mesh():
    (rank,) = placing.make_ranks(1)
    assert rank.replicated == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert rank.of_value((4,)) == rank.of_parameter(COLUMNS, (4, 4)) == rank.replicated
    assert rank.device == jax.devices()[0]
