import itertools

import numpy as np
import pytest

from rrfp_jax import errors
from rrfp_jax.data import buckets as buckets_lib

Bucket = buckets_lib.Bucket


def test_all_lengths_times_all_image_slots_are_declared(digits_config):
    assert buckets_lib.buckets(digits_config(), 2) == [
        Bucket(4, 36, 0),
        Bucket(4, 36, 4),
        Bucket(4, 36, 16),
        Bucket(4, 64, 0),
        Bucket(4, 64, 4),
        Bucket(4, 64, 16),
    ]


def test_no_image_is_always_possible(digits_config):
    slots = {
        b.num_images for b in buckets_lib.buckets(digits_config(image_buckets=(4,)), 2)
    }
    assert slots == {0, 4}


def test_image_slots_that_a_length_cannot_reach_are_left_out(digits_config):
    """Rows of 3 hold no image of 4 tokens; 4 rows of 8 hold 8 images, not 9."""
    config = digits_config(length_buckets=(3, 8, 64), image_buckets=(4, 8, 16))
    shapes = [(b.length, b.num_images) for b in buckets_lib.buckets(config, 2)]
    assert shapes == [
        (3, 0),
        (8, 0),
        (8, 4),
        (8, 8),
        (64, 0),
        (64, 4),
        (64, 8),
        (64, 16),
    ]


def test_packed_text_has_one_bucket(text_config):
    assert buckets_lib.buckets(text_config(source="stdlib"), 4) == [Bucket(1, 8, 0)]


def test_the_smallest_bucket_that_holds_the_samples_is_chosen(
    digits_config, make_sample
):
    config = digits_config()

    def choose(*samples):
        bucket = buckets_lib.choose(samples, 4, config)
        return bucket.length, bucket.num_images

    assert choose() == (36, 0)
    assert choose(make_sample(0, 36)) == (36, 0)
    assert choose(make_sample(0, 37), make_sample(1, 5)) == (64, 0)
    assert choose(make_sample(0, 20, (0, 4)), make_sample(1, 20, (0, 8))) == (36, 4)
    assert choose(make_sample(0, 64, (0, 4, 8, 12, 16))) == (64, 16)


def test_whatever_comes_the_chosen_bucket_is_a_declared_one(digits_config, make_sample):
    """Bounds the number of compilations (C12)."""
    config = digits_config()
    declared = buckets_lib.buckets(config, 2)
    rng = np.random.default_rng(0)
    for _, num_samples in itertools.product(range(50), range(5)):
        samples = []
        for i in range(num_samples):
            starts = tuple(range(0, 4 * int(rng.integers(4)), 4))
            shortest = 4 * len(starts) + 1
            samples.append(make_sample(i, int(rng.integers(shortest, 65)), starts))
        assert buckets_lib.choose(samples, 4, config) in declared


def test_a_sample_longer_than_all_buckets_is_named_not_cut(digits_config, make_sample):
    with pytest.raises(errors.ConfigError) as caught:
        buckets_lib.choose([make_sample(7, 65, (0, 9))], 4, digits_config())
    parts = ("sample 7", "65 positions", "8 of them of 2 images", "(36, 64) is 64")
    for part in (*parts, "--config.data.length_buckets"):
        assert part in str(caught.value)


def test_more_images_than_the_largest_bucket_are_refused(digits_config, make_sample):
    config = digits_config(image_buckets=(0, 3))
    samples = [make_sample(0, 9, (0, 4)), make_sample(1, 9, (0, 4))]
    with pytest.raises(errors.ConfigError) as caught:
        buckets_lib.choose(samples, 4, config)
    parts = ("4 rows holds 4 images", "data.image_buckets=(0, 3) is 3")
    for part in (*parts, "Add 4 or more to --config.data.image_buckets"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("counts", "what", "add"),
    [
        ([1, 0, 17], "a sample has 17 images", "Add 36 "),
        ([5] + [1] * 20, "a microbatch of 4 rows may hold 12 images", "Add 12 "),
        ([3], "a microbatch of 4 rows may hold 12 images", "Add 12 "),
        ([3, 3, 3, 3], "a microbatch of 4 rows may hold 12 images", "Add 12 "),
    ],
)
def test_data_that_some_shuffle_would_overfill_is_refused_ahead(
    digits_config, counts: list[int], what: str, add: str
):
    config = digits_config(image_buckets=(0, 11))
    with pytest.raises(errors.ConfigError) as caught:
        buckets_lib.check_images(counts, config, 2)
    for part in (what, "data.image_buckets=(0, 11) is 11", add + "to --config.data"):
        assert part in str(caught.value)


def test_data_that_fits_in_every_order_passes(digits_config):
    buckets_lib.check_images([5] + [1] * 20, digits_config(image_buckets=(12,)), 2)
