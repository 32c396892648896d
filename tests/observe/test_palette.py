"""Kinds differ in hue, chunks within it, microbatches in lightness; for all eyes."""

import itertools

import numpy as np
import pytest

from rrfp_jax.core.task import Kind
from rrfp_jax.observe import palette

# What those without red, green or blue cones see, in linear RGB (Machado et al. 2009).
SEEN = {
    "everything": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
LINEAR_RGB_TO_XYZ = [
    [0.4124, 0.3576, 0.1805],
    [0.2126, 0.7152, 0.0722],
    [0.0193, 0.1192, 0.9505],
]
WHITE = [0.9505, 1.0, 1.089]


def lab_of(shades, eyes):
    """CIELAB, in which a distance of 2.3 is just noticeable."""
    linear = np.where(
        shades <= 0.04045, shades / 12.92, ((shades + 0.055) / 1.055) ** 2.4
    )
    seen = np.clip(linear @ np.array(SEEN[eyes]).T, 0, 1)
    xyz = seen @ np.array(LINEAR_RGB_TO_XYZ).T / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], axis=-1)


@pytest.mark.parametrize("kind", list(Kind))
def test_later_microbatches_are_darker_and_other_chunks_look_different(kind):
    shades = palette.ramp(kind, 0, 2, 8)
    assert shades.shape == (8, 3)
    assert all(shades[j].sum() > shades[j + 1].sum() for j in range(7))
    assert abs(shades - palette.ramp(kind, 1, 2, 8)).max() > 0.05


@pytest.mark.parametrize("eyes", list(SEEN))
def test_no_shade_of_a_kind_can_be_taken_for_any_of_another(eyes):
    seen = {
        kind: np.concatenate(
            [lab_of(palette.ramp(kind, chunk, 2, 24), eyes) for chunk in range(2)]
        )
        for kind in Kind
    }
    for one, other in itertools.combinations(Kind, 2):
        apart = np.linalg.norm(seen[one][:, None] - seen[other], axis=-1).min()
        assert apart > 2 * 2.3, (one, other)
