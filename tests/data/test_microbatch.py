import numpy as np
import pytest

from rrfp_jax import errors
from rrfp_jax.data import microbatch as microbatch_lib

PAD = 77


def _cut(samples, num_microbatches, config):
    return microbatch_lib.microbatches(samples, num_microbatches, config, pad_id=PAD)


def test_samples_are_split_in_order(digits_config, make_sample):
    samples = [make_sample(i, 5) for i in range(8)]
    for num_microbatches in (1, 2, 4, 8):
        parts = _cut(samples, num_microbatches, digits_config())
        assert len(parts) == num_microbatches
        assert sum((part.sample_ids for part in parts), ()) == tuple(range(8))


def test_lengths_differ_and_nothing_is_truncated(digits_config, make_sample):
    """C12: lengths 5, 3, 8, 1 in one step; each microbatch has its own bucket."""
    config = digits_config(batch_size=4, length_buckets=(3, 5, 8))
    samples = [make_sample(i, n) for i, n in enumerate((5, 3, 8, 1))]
    parts = _cut(samples, 4, config)
    assert [part.bucket.length for part in parts] == [5, 3, 8, 3]
    assert [part.num_tokens for part in parts] == [5, 3, 8, 1]
    for part, sample in zip(parts, samples, strict=True):
        length = sample.length
        assert part.arrays["tokens_BL"][0, :length].tolist() == sample.tokens_L.tolist()
        assert part.arrays["labels_BL"][0, :length].tolist() == sample.labels_L.tolist()


def test_padding_positions_are_masked_and_in_no_segment(digits_config, make_sample):
    config = digits_config(batch_size=2, length_buckets=(6,), image_buckets=(0,))
    (part,) = _cut([make_sample(0, 4)], 1, config)
    arrays = {name: array.tolist() for name, array in part.arrays.items()}
    assert arrays == {
        "tokens_BL": [[1, 2, 3, 4, PAD, PAD], [PAD] * 6],
        "labels_BL": [[2, 3, 4, 5, PAD, PAD], [PAD] * 6],
        "mask_BL": [[1, 1, 1, 1, 0, 0], [0] * 6],
        "positions_BL": [[0, 1, 2, 3, 0, 0], [0] * 6],
        "segment_ids_BL": [[1, 1, 1, 1, 0, 0], [0] * 6],
    }
    assert part.sample_ids == (0, -1)
    assert part.num_tokens == 4


def test_an_uneven_batch_ends_in_masked_rows(digits_config, make_sample):
    """C11: 8 samples over 3 microbatches of 3 rows."""
    samples = [make_sample(i, 5) for i in range(8)]
    parts = _cut(samples, 3, digits_config(batch_size=9))
    assert [p.sample_ids for p in parts] == [(0, 1, 2), (3, 4, 5), (6, 7, -1)]
    assert [p.num_tokens for p in parts] == [15, 15, 10]


def test_a_microbatch_may_be_all_padding(digits_config, make_sample):
    """C07: it has no token, and still the shape of a declared bucket."""
    first, second = _cut([make_sample(0, 5)], 2, digits_config(batch_size=2))
    assert (first.num_tokens, second.num_tokens) == (5, 0)
    assert second.sample_ids == (-1,)
    assert second.arrays["tokens_BL"].shape == (1, 36)


def test_image_tokens_are_indexed_over_the_whole_microbatch(digits_config, make_sample):
    config = digits_config(batch_size=3, length_buckets=(10,), image_buckets=(4,))
    samples = [make_sample(0, 9, (1,)), make_sample(1, 3), make_sample(2, 10, (0, 5))]
    (part,) = _cut(samples, 1, config)
    assert part.arrays["image_index_BL"].tolist() == [
        [-1, 0, 1, 2, 3, -1, -1, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1, -1, -1, -1, -1],
        [4, 5, 6, 7, -1, 8, 9, 10, 11, -1],
    ]
    images_NHWC = part.arrays["images_NHWC"]
    assert images_NHWC.shape == (4, 8, 8, 1)
    values = images_NHWC.reshape(4, -1)
    assert (values == values[:, :1]).all()
    expected = [10 / 127.5 - 1, 10 / 127.5 - 1, 20 / 127.5 - 1, 0]
    np.testing.assert_allclose(values[:, 0], expected, rtol=1e-6)


def test_pixels_fill_the_range_from_minus_one_to_one(digits_config, make_sample):
    sample = make_sample(0, 9, (0,))
    sample.images_HWC[0][0, 0], sample.images_HWC[0][0, 1] = 0, 255
    (part,) = _cut([sample], 1, digits_config(batch_size=1))
    pixels = part.arrays["images_NHWC"][0, 0, :2, 0]
    assert pixels.tolist() == [-1, 1]


def test_a_microbatch_without_images_has_no_image_arrays(digits_config, make_sample):
    """C15: images in microbatches 0 and 2 only."""
    starts = ((0,), (), (0, 4), ())
    samples = [make_sample(i, 9, starts[i]) for i in range(4)]
    parts = _cut(samples, 4, digits_config(batch_size=4))
    assert [part.bucket.num_images for part in parts] == [4, 0, 4, 0]
    assert ["images_NHWC" in part.arrays for part in parts] == [
        True,
        False,
        True,
        False,
    ]
    assert "image_index_BL" not in parts[1].arrays


def test_dtypes_are_those_of_the_contract(digits_config, make_sample):
    (part,) = _cut([make_sample(0, 9, (0,))], 1, digits_config(batch_size=1))
    dtypes = {name: str(array.dtype) for name, array in part.arrays.items()}
    assert dtypes == {
        "tokens_BL": "int32",
        "labels_BL": "int32",
        "mask_BL": "float32",
        "positions_BL": "int32",
        "segment_ids_BL": "int32",
        "images_NHWC": "float32",
        "image_index_BL": "int32",
    }


def test_rows_that_cannot_be_shared_out_are_refused(digits_config, make_sample):
    with pytest.raises(errors.ConfigError, match=r"to 2 or 4\."):
        _cut([make_sample(0, 5)], 3, digits_config())
