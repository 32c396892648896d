"""A rank in all replicas: one mesh over buffers that each replica sees as its own."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from rrfp_jax.runtime import placing
from rrfp_jax.runtime.replicas import Replicas

COLUMNS = PartitionSpec(None, "model")


@pytest.fixture
def pair() -> Replicas:
    """Two replicas of a rank of two devices."""
    return Replicas(tuple(placing.make_ranks(2, model=2)))


def terms(pair: Replicas, spec: PartitionSpec, *values: np.ndarray) -> list[jax.Array]:
    return [
        jax.device_put(value, rank.of_parameter(spec, value.shape))
        for rank, value in zip(pair.ranks, values, strict=True)
    ]


def test_a_value_in_all_replicas_and_in_one_are_the_same_buffers(pair: Replicas):
    x = np.arange(8.0, dtype=np.float32).reshape(2, 4)
    here = [rank.of_parameter(COLUMNS, x.shape) for rank in pair.ranks]
    whole = jax.device_put(x, pair.over(here[0]))
    for rank_sharding in here:
        seen = pair.view(whole, rank_sharding)
        assert seen.sharding == rank_sharding
        np.testing.assert_array_equal(seen, x)
        buffers = {s.data.unsafe_buffer_pointer() for s in whole.addressable_shards}
        mine = {s.data.unsafe_buffer_pointer() for s in seen.addressable_shards}
        assert mine < buffers
    joined = pair.joined([pair.view(whole, each) for each in here], here[0])
    assert joined.sharding == whole.sharding
    np.testing.assert_array_equal(joined, x)


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("spec", [PartitionSpec(), COLUMNS])
def test_terms_of_the_replicas_are_added_up(
    pair: Replicas, spec: PartitionSpec, is_cut: bool
):
    x = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    each = terms(pair, spec, x, 10 * x)
    where = each[0].sharding
    aval = jax.ShapeDtypeStruct(x.shape, x.dtype)
    reduce = pair.reducer([aval], [where], is_cut)
    (total,) = reduce([pair.joined(each, where)])
    np.testing.assert_array_equal(total, 11 * x)
    assert total.sharding == (pair.cut if is_cut else lambda s, _: pair.over(s))(
        where, x.shape
    )
    num_parts = (2 if spec == COLUMNS else 1) * (2 if is_cut else 1)
    assert total.addressable_shards[0].data.size == x.size // num_parts


@pytest.mark.parametrize(
    ("spec", "shape", "cut"),
    [
        (PartitionSpec(), (4, 6), PartitionSpec(None, "replica")),  # the longest axis
        (COLUMNS, (4, 6), PartitionSpec("replica", "model")),  # no axis twice
        (PartitionSpec(), (3,), PartitionSpec()),  # nothing that two divide
        (PartitionSpec(), (), PartitionSpec()),
    ],
)
def test_moments_are_cut_where_an_axis_allows_it(pair: Replicas, spec, shape, cut):
    where = pair.cut(pair.ranks[0].of_parameter(spec, shape), shape)
    assert where.is_equivalent_to(
        jax.sharding.NamedSharding(pair.mesh, cut), len(shape)
    )


def test_one_replica_is_left_as_it_is():
    alone = Replicas(tuple(placing.make_ranks(1, model=2)))
    where = alone.ranks[0].of_parameter(COLUMNS, (2, 4))
    x = jax.device_put(np.ones((2, 4), np.float32), where)
    assert alone.over(where) is where
    assert alone.view(x, where) is x
    assert alone.joined([x], where) is x
    assert alone.processes == (0,)
