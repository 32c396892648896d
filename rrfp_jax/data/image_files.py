"""Reading one image file of the user."""

import pathlib

import numpy as np
from PIL import Image

from rrfp_jax import errors
from rrfp_jax.data import sample as sample_lib


def load_image(
    path: pathlib.Path, image_size: tuple[int, int], channels: int, origin: str
) -> sample_lib.Array:
    """Decodes an image and scales it, bicubic, without keeping the aspect ratio.

    Args:
      path: of the file, in any format PIL reads.
      image_size: (height, width) of the result in pixels.
      channels: 1 for gray, 3 for RGB.
      origin: the record that names the image, for messages.

    Returns:
      uint8 of shape (height, width, channels).

    Raises:
      ConfigError: when the file is missing or is not an image.
    """
    if not path.is_file():
        raise errors.ConfigError(
            f"{origin}: the image {path} does not exist.\n"
            "  Correct the record, or --config.data.image_folder."
        )
    height, width = image_size
    try:
        with Image.open(path) as image:
            converted = image.convert("L" if channels == 1 else "RGB")
    except (OSError, SyntaxError, ValueError) as error:  # All three, by format.
        raise errors.ConfigError(
            f"{origin}: {path} is not an image that can be read: {error}.\n"
            "  Replace the file in --config.data.image_folder, or remove the record."
        ) from error
    resized = converted.resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(resized, np.uint8).reshape(height, width, channels)
