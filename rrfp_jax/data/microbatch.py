"""Samples to the padded arrays of microbatches.

B: rows. L: positions of a row, image tokens included. N: image slots.
H, W, C: height, width, channels in pixels. T: tokens of one image.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from rrfp_jax.data import buckets as buckets_lib
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import sample as sample_lib

PADDING_ID = -1
"""The sample id of a row that holds no sample."""


@dataclasses.dataclass(frozen=True, eq=False)
class Microbatch:
    """The arrays of one microbatch, on the host.

    Attributes:
      arrays: by name:
        tokens_BL: int32; image and padding positions hold a padding id.
        labels_BL: int32; the target of each position, that is the next token.
        mask_BL: float32; 1 where the label counts for the loss.
        positions_BL: int32; from 0 in each segment.
        segment_ids_BL: int32; 0 on padding, from 1 for what is packed in the row.
        and if `bucket.num_images` > 0:
        images_NHWC: float32 in [-1, 1]; zeros in unused slots.
        image_index_BL: int32; -1 on text, else k*T + t for token t of image k.
      bucket: their shapes.
      num_tokens: sum of the mask; 0 is legal.
      sample_ids: of each row, `PADDING_ID` on padding rows.
    """

    arrays: dict[str, sample_lib.Array]
    bucket: buckets_lib.Bucket
    num_tokens: float
    sample_ids: tuple[int, ...]


def microbatches(
    samples: Sequence[sample_lib.Sample],
    num_microbatches: int,
    config: config_lib.DataConfig,
    pad_id: int = 0,
) -> list[Microbatch]:
    """Cuts one step's samples, in order, into padded microbatches.

    Each takes the smallest declared bucket that holds it. Fewer samples than
    `batch_size` leave masked rows at the end, and perhaps whole masked microbatches.

    Args:
      samples: at most `config.batch_size`.
      num_microbatches: how many to make.
      config: with the batch size and the declared buckets.
      pad_id: the token on padding positions; masked, so its value has no effect.

    Returns:
      `num_microbatches` of them, each with batch_size / num_microbatches rows.

    Raises:
      ConfigError: when no declared bucket holds a microbatch, or the rows cannot be
        shared out evenly.
    """
    config_lib.check_num_microbatches(config.batch_size, num_microbatches)
    assert len(samples) <= config.batch_size, (len(samples), config.batch_size)
    rows = config.batch_size // num_microbatches
    parts = [samples[i * rows : (i + 1) * rows] for i in range(num_microbatches)]
    return [
        _pad(part, buckets_lib.choose(part, rows, config), config, pad_id)
        for part in parts
    ]


def _pad(
    samples: Sequence[sample_lib.Sample],
    bucket: buckets_lib.Bucket,
    config: config_lib.DataConfig,
    pad_id: int,
) -> Microbatch:
    shape = (bucket.rows, bucket.length)
    arrays: dict[str, sample_lib.Array] = {
        "tokens_BL": np.full(shape, pad_id, np.int32),
        "labels_BL": np.full(shape, pad_id, np.int32),
        "mask_BL": np.zeros(shape, np.float32),
        "positions_BL": np.zeros(shape, np.int32),
        "segment_ids_BL": np.zeros(shape, np.int32),
    }
    for row, sample in enumerate(samples):
        arrays["tokens_BL"][row, : sample.length] = sample.tokens_L
        arrays["labels_BL"][row, : sample.length] = sample.labels_L
        arrays["mask_BL"][row, : sample.length] = sample.mask_L
        arrays["positions_BL"][row, : sample.length] = sample.positions_L
        arrays["segment_ids_BL"][row, : sample.length] = sample.segments_L
    if bucket.num_images:
        arrays |= _image_arrays(samples, bucket, config)
    num_padding = bucket.rows - len(samples)
    return Microbatch(
        arrays=arrays,
        bucket=bucket,
        num_tokens=float(arrays["mask_BL"].sum()),
        sample_ids=(*(s.sample_id for s in samples), *[PADDING_ID] * num_padding),
    )


def _image_arrays(
    samples: Sequence[sample_lib.Sample],
    bucket: buckets_lib.Bucket,
    config: config_lib.DataConfig,
) -> dict[str, sample_lib.Array]:
    """Returns the images in slots 0.. and, for each position, which token it takes."""
    size = config.tokens_per_image
    images_NHWC = np.zeros(
        (bucket.num_images, *config.image_size, config.channels), np.float32
    )
    image_index_BL = np.full((bucket.rows, bucket.length), -1, np.int32)
    slot = 0
    for row, sample in enumerate(samples):
        for start, image_HWC in zip(
            sample.image_starts, sample.images_HWC, strict=True
        ):
            images_NHWC[slot] = image_HWC.astype(np.float32) / 127.5 - 1
            index_T = np.arange(slot * size, (slot + 1) * size)
            image_index_BL[row, start : start + size] = index_T
            slot += 1
    return {"images_NHWC": images_NHWC, "image_index_BL": image_index_BL}
