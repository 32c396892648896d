import numpy as np
import pytest

from rrfp_jax import errors
from rrfp_jax.data import validate as validate_lib


class _Listed:
    """A list of samples that notes which were read."""

    image_counts = (0,)

    def __init__(self, samples):
        self._samples = samples
        self.read = set()

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        self.read.add(index)
        return self._samples[index]


def test_every_sample_is_read(digits_config, make_sample):
    source = _Listed([make_sample(i, 5) for i in range(600)])
    validate_lib.validate(source, digits_config(), "data")
    assert source.read == set(range(600))


@pytest.mark.parametrize("num_workers", [0, 3])
def test_the_first_sample_that_is_too_long_is_named(
    digits_config, make_sample, num_workers: int
):
    lengths = np.full(400, 5)
    lengths[[300, 350]] = 65, 66
    source = _Listed([make_sample(i, int(n)) for i, n in enumerate(lengths)])
    with pytest.raises(errors.ConfigError, match=r"sample 300: .* 65 positions"):
        validate_lib.validate(source, digits_config(num_workers=num_workers), "data")
