from typing import Any

import pytest

from rrfp_jax import errors
from rrfp_jax.data import config as config_lib


def test_indivisible_batch_names_the_nearest_legal_microbatch_counts():
    with pytest.raises(errors.ConfigError) as caught:
        config_lib.check_num_microbatches(64, 6)
    assert str(caught.value) == (
        "pipeline.num_microbatches=6 does not divide data.batch_size=64.\n"
        "  Set --config.pipeline.num_microbatches to 4 or 8."
    )


@pytest.mark.parametrize(
    ("batch_size", "num_microbatches", "remedy"),
    [(64, 0, "to 1."), (64, 100, "to 64."), (7, 3, "to 1 or 7."), (8, -2, "to 1.")],
)
def test_nearest_legal_microbatch_counts_at_the_ends(
    batch_size: int, num_microbatches: int, remedy: str
):
    with pytest.raises(errors.ConfigError) as caught:
        config_lib.check_num_microbatches(batch_size, num_microbatches)
    assert str(caught.value).endswith(remedy)


def test_every_divisor_is_a_legal_microbatch_count():
    for num_microbatches in (1, 2, 3, 4, 6, 12):
        config_lib.check_num_microbatches(12, num_microbatches)


def test_values_of_a_config_dict_are_coerced(digits_config):
    config = digits_config(source="digits", length_buckets=[36, 64])
    assert config.source is config_lib.DataSource.DIGITS
    assert config.length_buckets == (36, 64)
    assert hash(config) == hash(digits_config())


def test_tokens_per_image_counts_patches(digits_config):
    assert digits_config(image_size=(16, 24), patch_size=4).tokens_per_image == 24


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ({"source": "c4"}, ["data.source='c4'", "digits, stdlib, jsonl, llava"]),
        ({"batch_size": 0}, ["data.batch_size=0", "to 1 or more"]),
        ({"patch_size": 0}, ["data.patch_size=0", "--config.data.patch_size"]),
        ({"max_images_per_sample": 0}, ["--config.data.max_images_per_sample to 1"]),
        ({"num_workers": -1}, ["data.num_workers=-1", "--config.data.num_workers"]),
        ({"prefetch": -1}, ["data.prefetch=-1", "--config.data.prefetch"]),
        ({"seed": -1}, ["data.seed=-1", "--config.data.seed"]),
        ({"seed": 2**32}, [f"data.seed={2**32}", "--config.data.seed"]),
        (
            {"length_buckets": (64, 36)},
            ["data.length_buckets=(64, 36)", "e.g. (36, 64)"],
        ),
        ({"length_buckets": ()}, ["data.length_buckets=()", "at least one size"]),
        ({"length_buckets": (0, 64)}, ["data.length_buckets=(0, 64)", "e.g. (64,)"]),
        ({"image_buckets": (4, 4)}, ["data.image_buckets=(4, 4)", "e.g. (4,)"]),
        ({"channels": 2}, ["data.channels=2", "--config.data.channels to 1 or 3"]),
        (
            {"image_size": (16, 24), "patch_size": 5},
            ["data.patch_size=5", "data.image_size=(16, 24)", "multiples of 5"],
        ),
        (
            {"image_size": (12, 12)},
            ["data.image_size=(12, 12)", "multiples of 8"],
        ),
        (
            {"length_buckets": (3, 4)},
            ["data.length_buckets=(3, 4)", "takes 4 positions", "more than 4"],
        ),
        ({"paths": ("x",)}, ["data.paths=('x',)", "Leave --config.data.paths empty"]),
        ({"image_folder": "x"}, ["data.image_folder='x'", "source to llava."]),
        ({"source": "llava"}, ["data.paths is empty", "--config.data.paths"]),
        (
            {"source": "jsonl", "paths": ("x",)},
            ["length_buckets=(36, 64)", "--config.data.length_buckets to (64,)"],
        ),
        (
            {"source": "stdlib", "length_buckets": (64,)},
            ["data.image_buckets=(0, 4, 16)", "--config.data.image_buckets to (0,)"],
        ),
    ],
)
def test_an_illegal_value_is_named_with_its_remedy(
    digits_config, fields: dict[str, Any], parts: list[str]
):
    with pytest.raises(errors.ConfigError) as caught:
        digits_config(**fields)
    for part in parts:
        assert part in str(caught.value)
