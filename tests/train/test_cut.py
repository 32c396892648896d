"""A model becomes stages: by counts, by FLOPs, tower after tower."""

import dataclasses
from typing import Any

import jax
import pytest

from rrfp_jax.errors import ConfigError
from rrfp_jax.models.config import LanguageConfig, VisionConfig
from rrfp_jax.models.layer import Model, Shape
from rrfp_jax.models.model import build
from rrfp_jax.train.config import ModelConfig, PipelineConfig
from rrfp_jax.train.stages import Cut, cut_model, flops

LANGUAGE = LanguageConfig(
    vocab_size=32,
    num_layers=4,
    width=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=16,
    max_length=32,
    tied=True,
)
VISION = VisionConfig(
    image_size=(8, 8),
    channels=1,
    patch_size=4,
    width=16,
    num_layers=2,
    num_heads=2,
    mlp_width=16,
)
SHAPE = Shape(rows=2, length=32, num_images=4)


def cut(
    counts: tuple[int, ...] = (),
    ranks: int = 4,
    vision: VisionConfig | None = None,
    frozen: tuple[str, ...] = (),
    language: LanguageConfig = LANGUAGE,
) -> tuple[Model, Cut]:
    model = build(language, vision)
    config = ModelConfig(language, vision, frozen=frozen)
    pipeline = PipelineConfig(ranks, 4, layer_counts=counts)
    costs = flops(model, frozen, SHAPE)
    return model, cut_model(model, config, pipeline, costs)


def names(found: Cut) -> list[list[str]]:
    return [[layer.name for layer in layers] for layers in found.layers]


def test_counts_cut_a_chain_in_order():
    model, found = cut((1, 2, 2, 1))
    assert names(found) == [
        ["language/embed"],
        ["language/block_00", "language/block_01"],
        ["language/block_02", "language/block_03"],
        ["language/head"],
    ]
    assert found.edges == ((0, 1), (1, 2), (2, 3))
    assert found.tower_of == ("language",) * 4
    assert [x for layers in found.layers for x in layers] == list(model.layers)


def test_a_tower_ends_where_the_language_model_begins():
    _, found = cut((1, 3, 2, 4), vision=VISION)
    assert [len(layers) for layers in found.layers] == [1, 3, 2, 4]
    assert found.tower_of == ("vision", "vision", "language", "language")
    assert found.edges == ((0, 1), (1, 2), (2, 3))
    assert found.without_images() == (0, 1)
    assert names(found)[1][-1] == "projector"
    assert names(found)[2][0] == "language/embed"


def test_a_text_model_skips_nothing():
    assert cut()[1].without_images() == ()


@pytest.mark.parametrize("vision", [None, VISION])
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 6])
def test_a_balanced_cut_is_the_best_of_all_cuts(
    ranks: int, vision: VisionConfig | None
):
    model, found = cut(ranks=ranks, vision=vision)
    costs = {layer.name: layer.flops(SHAPE) for layer in model.layers}
    largest = max(sum(costs[n] for n in stage) for stage in names(found))
    towers = [[costs[x.name] for x in tower.layers] for tower in model.towers]
    assert largest == pytest.approx(best(towers, ranks))
    assert all(names(found))


def best(towers: list[list[float]], parts: int) -> float:
    """Returns the smallest largest stage, by trying all cuts between layers."""
    first, *rest = towers
    options = []
    for mine in range(1, min(parts - len(rest), len(first)) + 1):
        if rest or mine == parts:
            others = best(rest, parts - mine) if rest else 0.0
            options.append(max(one_tower(first, mine), others))
    return min(options)


def one_tower(costs: list[float], parts: int) -> float:
    if parts == 1:
        return sum(costs)
    return min(
        max(sum(costs[:i]), one_tower(costs[i:], parts - 1))
        for i in range(1, len(costs) - parts + 2)
    )


def test_a_frozen_tower_is_cheaper_and_gets_fewer_stages():
    heavy = dataclasses.replace(VISION, num_layers=4, width=32, mlp_width=128)
    _, trained = cut(ranks=5, vision=heavy)
    _, frozen = cut(ranks=5, vision=heavy, frozen=("vision/",))
    assert frozen.tower_of.count("vision") < trained.tower_of.count("vision")


def test_tied_places_name_stage_layer_and_path_owner_first():
    _, found = cut((3, 3), ranks=2)
    assert found.tied == (
        ((0, "language/embed", "embedding"), (1, "language/head", "embedding")),
    )
    untied = dataclasses.replace(LANGUAGE, tied=False)
    assert cut(language=untied)[1].tied == ()


def test_frozen_names_are_beginnings():
    _, found = cut(vision=VISION, frozen=("vision/block", "projector"))
    assert found.frozen == {"vision/block_00", "vision/block_01", "projector"}
    trained = [name for stage in range(4) for name in found.trained(stage)]
    assert "vision/patch_embed" in trained
    assert not found.frozen & set(trained)


def test_parameters_are_grouped_by_stage_under_their_own_names():
    model, found = cut((2, 4), ranks=2)
    params = jax.eval_shape(model.init, jax.random.key(0))
    trees = found.by_stage(params)
    assert [list(tree) for tree in trees] == names(found)
    specs = found.partition(trees)
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(trees)


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, jax.sharding.PartitionSpec)


def test_a_stage_reads_only_what_its_layers_read():
    _, found = cut((1, 1, 2, 6), vision=VISION)
    keys = ("tokens_BL", "labels_BL", "mask_BL", "positions_BL", "images_NHWC")
    feeds = [stage.select(dict.fromkeys(keys)) for stage in found.stages("none")]
    assert [sorted(feed) for feed in feeds[:2]] == [["images_NHWC"], []]
    assert "images_NHWC" not in feeds[2]
    assert {"labels_BL", "mask_BL"} <= set(feeds[3])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"counts": (1, 2, 1, 1)}, ["sum to 5", "6 layers", "layer_counts"]),
        ({"counts": (2, 2, 1, 2)}, ["sum to 7", "6 layers", "layer_counts"]),
        ({"counts": (3, 3, 1, 1)}, ["beyond the last layer", "layer_counts"]),
        ({"counts": (0, 2, 2, 2)}, ["[0, 2, 2, 2]", "at least 1"]),
        ({"counts": (1, 2, 4, 3), "vision": VISION}, ["span two towers", "'vision'"]),
        ({"ranks": 7}, ["7 stages", "6 layers", "--config.pipeline.num_ranks"]),
        ({"ranks": 1, "vision": VISION}, ["1 stages", "2 towers"]),
        ({"frozen": ("vision/",)}, ["'vision/'", "no layer", "--config.model.frozen"]),
        ({"frozen": ("language/head",)}, ["one of the tied", "language/embed"]),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_cut_that_does_not_fit_is_refused_with_its_numbers(
    arguments: dict[str, Any], words: list[str]
):
    with pytest.raises(ConfigError) as refused:
        cut(**arguments)
    for word in words:
        assert word in str(refused.value)
