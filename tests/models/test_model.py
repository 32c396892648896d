"""Whole models: names, initial values, dropout, precision and partition."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax.models import cut, model


def with_dropout(feed, seed=0):
    return {**feed, "dropout_key": jax.random.key_data(jax.random.key(seed))}


def test_names_are_global_and_towers_are_in_topological_order(
    make_language, make_vision
):
    built = model.build(make_language(), make_vision())
    assert [layer.name for layer in built.layers] == [
        "vision/patch_embed",
        "vision/block_00",
        "projector",
        "language/embed",
        "language/block_00",
        "language/block_01",
        "language/head",
    ]
    assert [(t.name, t.feeds_into) for t in built.towers] == [
        ("vision", "language"),
        ("language", None),
    ]


def test_ranks_that_initialise_their_own_layers_agree_bitwise(make_language):
    built = model.build(make_language(tied=True, num_layers=1), None)
    key = jax.random.key(3)
    whole = jax.jit(built.init)(key)
    names = ["language/block_00", "language/head"]
    part = jax.jit(lambda key: built.init(key, names))(key)
    assert list(part) == names
    for name in names:
        jax.tree.map(np.testing.assert_array_equal, part[name], whole[name])


@pytest.mark.parametrize("compiler", [jax.jit, lambda function: function])
def test_tied_tables_are_equal_but_no_shared_buffer(make_language, compiler):
    built = model.build(make_language(tied=True), None)
    ((owner, copy),) = built.ties
    names = [owner[0], copy[0]]
    params = compiler(lambda key: built.init(key, names))(jax.random.key(0))
    assert (owner, copy) == (
        ("language/embed", "embedding"),
        ("language/head", "embedding"),
    )
    tables = [params[name][leaf] for name, leaf in (owner, copy)]
    np.testing.assert_array_equal(*tables)
    pointers = {table.unsafe_buffer_pointer() for table in tables}
    assert len(pointers) == 2


def test_parameters_are_counted_once(make_language):
    untied = model.build(make_language(), None)
    tied = model.build(make_language(tied=True), None)
    block = 16 * 24 * 2 + 16 * 12 * 2 + 3 * 16 * 20 + 2 * 16
    assert untied.num_params == 2 * 24 * 16 + 2 * block + 16
    assert tied.num_params == untied.num_params - 24 * 16


@pytest.mark.parametrize("kind", ["llama", "gpt3"])
def test_initial_values_keep_the_scale_and_blocks_differ(make_language, kind):
    spec = make_language(kind, width=64, mlp_width=96)
    names = "language/block_00", "language/block_01"
    params = model.build(spec, None).init(jax.random.key(0), names)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    first, second = params["language/block_00"], params["language/block_01"]
    query = first["attention"]["query"]["kernel"]
    assert abs(np.std(query) - 0.125) < 0.01  # 1 / sqrt(width)
    last = first["mlp"]["down" if kind == "llama" else "fc2"]["kernel"]
    assert abs(np.std(last) - 0.051) < 0.005  # 1 / sqrt(96) / sqrt(2 * 2 branches)
    assert np.any(query != second["attention"]["query"]["kernel"])
    has_bias = "bias" in first["attention"]["query"]
    assert has_bias == (kind == "gpt3")


@pytest.mark.parametrize(
    ("num_images", "dropout", "counts"), [(0, 0.1, [1, 1, 1]), (2, 0.0, [2, 2, 2])]
)
def test_every_cut_composes_to_the_same_loss(
    make_language, make_vision, make_feed, randomise, num_images, dropout, counts
):
    """Each part gets only the parameters and the feed that it says it reads."""
    built = model.build(make_language(num_layers=1, dropout=dropout), make_vision())
    shapes = jax.eval_shape(built.init, jax.random.key(0))
    params = randomise(shapes, scale=0.3)
    feed = with_dropout(make_feed(num_images))
    layers = built.layers if num_images else built.towers[1].layers
    whole = jax.jit(cut.run(layers))(params, None, feed)
    carry = None
    for part in cut.by_counts(layers, counts):
        own = {layer.name: params[layer.name] for layer in part}
        read = frozenset().union(*(layer.feed_keys for layer in part))
        fed = {key: feed[key] for key in read if key in feed}
        carry = jax.jit(cut.run(part))(own, carry, fed)
    np.testing.assert_allclose(carry["loss"], whole["loss"], rtol=1e-5)
    assert np.isfinite(whole["loss"])


def test_dropout_masks_follow_key_and_layer_and_nothing_else(
    make_language, make_feed, randomise
):
    built = model.build(make_language(dropout=0.5), None)
    params = randomise(jax.eval_shape(built.layers[1].init, jax.random.key(0)))
    first, second = (jax.jit(layer.apply) for layer in built.layers[1:3])
    h = np.random.default_rng(0).normal(size=(2, 10, 16)).astype("f4")
    fed = with_dropout(make_feed())
    once, twice = first(params, h, fed), first(params, h, fed)
    np.testing.assert_array_equal(once, twice)
    assert np.any(once != first(params, h, with_dropout(make_feed(), seed=1)))
    assert np.any(once != second(params, h, fed))
    assert np.any(once != first(params, h, make_feed()))


def test_a_dropped_embedding_keeps_its_mean(make_language, make_feed):
    layer = model.build(make_language(dropout=0.25), None).layers[0]
    params = {"embedding": jnp.ones((24, 16))}
    h = layer.apply(params, None, with_dropout(make_feed()))
    assert set(np.unique(h)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs(h.mean() - 1) < 0.15


def test_without_dropout_no_layer_asks_for_a_key(make_language, make_vision):
    built = model.build(make_language(), make_vision())
    assert not any("dropout_key" in layer.feed_keys for layer in built.layers)


def test_bfloat16_is_close_to_float32(make_language, make_vision, make_feed, randomise):
    feed = make_feed(num_images=2)
    losses = {}
    for dtype in ("float32", "bfloat16"):
        built = model.build(
            make_language(compute_dtype=dtype, num_layers=1, qk_norm=True, tied=True),
            make_vision(compute_dtype=dtype),
        )
        shapes = jax.eval_shape(built.init, jax.random.key(0))
        params = randomise(shapes, scale=0.3)

        def loss(params, built=built):
            return cut.run(built.layers)(params, None, feed)["loss"]

        losses[dtype] = jax.jit(loss)(params)
        grads = jax.eval_shape(jax.grad(loss), params)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
    assert losses["bfloat16"].dtype == jnp.float32
    np.testing.assert_allclose(losses["bfloat16"], losses["float32"], rtol=0.02)
    assert losses["bfloat16"] != losses["float32"]


@pytest.mark.parametrize("kind", ["llama", "gpt3"])
def test_bfloat16_parameters_are_cast_once_and_first(make_language, make_feed, kind):
    layer = model.build(make_language(kind, compute_dtype="bfloat16"), None).layers[1]
    shapes = jax.eval_shape(layer.init, jax.random.key(0))
    h = jax.ShapeDtypeStruct((2, 10, 16), jnp.bfloat16)
    traced = jax.make_jaxpr(
        lambda p: layer.apply(p, jnp.zeros(h.shape, h.dtype), make_feed())
    )(shapes)
    assert traced.out_avals[0].dtype == jnp.bfloat16
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(shapes)
    ]
    for path, var in zip(paths, traced.jaxpr.invars, strict=True):
        users = [eqn for eqn in traced.jaxpr.eqns if var in eqn.invars]
        if not re.search("norm", path):
            assert [eqn.primitive.name for eqn in users] == ["convert_element_type"]


def test_partition_has_the_structure_of_the_parameters_and_divides(
    make_language, make_vision
):
    wide = functools.partial(
        make_language, num_heads=8, width=64, vocab_size=512, mlp_width=96
    )
    for built in (
        model.build(wide(num_kv_heads=4, tied=True), make_vision(mlp_width=32)),
        model.build(wide("gpt3", num_kv_heads=8), None),
    ):
        num_split = 0
        for layer in built.layers:
            shapes = jax.eval_shape(layer.init, jax.random.key(0))
            specs = layer.partition(shapes)
            assert jax.tree.structure(specs) == jax.tree.structure(shapes)
            for spec, leaf in zip(
                jax.tree.leaves(specs), jax.tree.leaves(shapes), strict=True
            ):
                split = [i for i, axis in enumerate(spec) if axis == "model"]
                assert all(leaf.shape[i] % 4 == 0 for i in split)
                num_split += len(split)
        assert num_split > 10


def test_megatron_splits_outputs_then_inputs(make_language):
    layer = model.build(make_language("gpt3"), None).layers[1]
    specs = layer.partition(jax.eval_shape(layer.init, jax.random.key(0)))
    spec = jax.sharding.PartitionSpec
    assert specs["attention"]["key"] == {
        "kernel": spec(None, "model"),
        "bias": spec("model"),
    }
    assert specs["mlp"]["fc2"] == {"kernel": spec("model", None), "bias": spec()}
    assert specs["mlp_norm"]["scale"] == spec()
