"""Colours of tasks: cold forwards, warm backwards, green weight gradients; lighter
early, darker late.

Blue against orange survives every common colour blindness, and the families also differ
where a rank holds several stages: chunks go from blue to cyan, from red to gold, and
from mint to sage. The greens are bluish and dull, since clear ones look like orange to
many people; they were chosen by their distance from all other shades as those see them.
"""

import numpy as np
import numpy.typing as npt
from matplotlib import colors

from rrfp_jax.core.task import Kind

Shades = npt.NDArray[np.float64]

IDLE = "#e7eaed"
INK = "#22282f"
FAINT = "#8a929b"
MEMORY = "#b9a9d6"
MEMORY_EDGE = "#5b4a86"

# (light, dark) of the first and of the last chunk of a rank.
_RAMPS = {
    Kind.F: (("#bdd6f0", "#0b4a91"), ("#a3dcf2", "#00647f")),
    Kind.B: (("#f9c0a2", "#b23a0e"), ("#f6dd86", "#8f6b00")),
    Kind.W: (("#a7e0c4", "#00664a"), ("#c9dfc4", "#2f5330")),
}


def ramp(kind: Kind, chunk: int, num_chunks: int, num_steps: int) -> Shades:
    """Returns the shades of a chunk, the first microbatch's first.

    Args:
      kind: of the tasks.
      chunk: index of the stage among those of its rank.
      num_chunks: stages of a rank.
      num_steps: shades wanted.

    Returns:
      RGB in 0 .. 1, of shape (num_steps, 3).
    """
    first, last = (np.array([colors.to_rgb(c) for c in pair]) for pair in _RAMPS[kind])
    at = chunk / max(num_chunks - 1, 1)
    light, dark = first * (1 - at) + last * at
    shades: Shades = light + np.linspace(0, 1, num_steps)[:, None] * (dark - light)
    return shades


def ink_on(rgb: Shades) -> str:
    """Returns the colour of a text that is readable on `rgb`."""
    luminance = float(np.dot(rgb, (0.299, 0.587, 0.114)))
    return INK if luminance > 0.52 else "white"
