"""Quantities are short and never ambiguous."""

import pytest

from rrfp_jax.observe import units


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (34 * 2**20, "34 MiB"),
        (1.26 * 2**30, "1.26 GiB"),
        (2**30 - 1, "1 GiB"),
        (1020 * 2**20, "1020 MiB"),
        (3 * 2**60, "3072 PiB"),
    ],
)
def test_bytes_have_about_three_digits_and_the_largest_unit_that_fits(num_bytes, words):
    assert units.bytes_in_words(num_bytes) == words
