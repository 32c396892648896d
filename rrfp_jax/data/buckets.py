"""The shapes that a microbatch may have, so that programs are compiled ahead.

A sample is never cut to fit: what no bucket holds is an error.
"""

import dataclasses
import heapq
from collections.abc import Sequence

from rrfp_jax import errors
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import sample as sample_lib


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shape of one microbatch; stage programs are compiled per bucket.

    Attributes:
      rows: B, padding rows included.
      length: L in positions, image tokens included.
      num_images: N, image slots of the whole microbatch; 0 means no image arrays.
    """

    rows: int
    length: int
    num_images: int


def buckets(config: config_lib.DataConfig, num_microbatches: int) -> list[Bucket]:
    """Returns every bucket that can occur, ascending.

    Args:
      config: with the declared sizes.
      num_microbatches: of one step.

    Returns:
      The declared lengths times the declared image slots, 0 included, without those
      whose rows are too short for more images than the next smaller bucket holds.

    Raises:
      ConfigError: when `num_microbatches` does not divide the batch.
    """
    config_lib.check_num_microbatches(config.batch_size, num_microbatches)
    rows = config.batch_size // num_microbatches
    slots = sorted({0, *config.image_buckets})
    found = []
    for length in config.length_buckets:
        fitting = rows * (length // config.tokens_per_image)
        for smaller, num_images in zip([-1, *slots], slots, strict=False):
            if num_images == 0 or fitting > smaller:
                found.append(Bucket(rows, length, num_images))
    return found


def choose(
    samples: Sequence[sample_lib.Sample], rows: int, config: config_lib.DataConfig
) -> Bucket:
    """Returns the smallest declared bucket that holds all samples of a microbatch.

    Args:
      samples: at most `rows`.
      rows: of the microbatch.
      config: with the declared sizes.

    Raises:
      ConfigError: when a sample is too long or the images are too many.
    """
    for sample in samples:
        check_length(sample, config)
    longest = max((sample.length for sample in samples), default=0)
    num_images = sum(len(sample.images_HWC) for sample in samples)
    slots = [size for size in (0, *config.image_buckets) if size >= num_images]
    if not slots:
        raise errors.ConfigError(
            f"a microbatch of {rows} rows holds {num_images} images; the largest of "
            f"data.image_buckets={config.image_buckets} is {config.image_buckets[-1]}."
            f"\n  Add {num_images} or more to --config.data.image_buckets, or raise "
            "--config.pipeline.num_microbatches."
        )
    lengths = [size for size in config.length_buckets if size >= longest]
    return Bucket(rows, lengths[0], min(slots))


def check_length(sample: sample_lib.Sample, config: config_lib.DataConfig) -> None:
    """Refuses a sample that no length bucket holds.

    Raises:
      ConfigError: with the sample, its length and the largest bucket.
    """
    if sample.length > config.length_buckets[-1]:
        num_images = len(sample.images_HWC)
        raise errors.ConfigError(
            f"{sample.origin}: the sample has {sample.length} positions, "
            f"{num_images * config.tokens_per_image} of them of {num_images} images; "
            f"the largest of data.length_buckets={config.length_buckets} is "
            f"{config.length_buckets[-1]}.\n  Add {sample.length} or more to "
            "--config.data.length_buckets; samples are never truncated."
        )


def check_images(
    counts: Sequence[int], config: config_lib.DataConfig, num_microbatches: int
) -> None:
    """Refuses data of which some shuffle could overfill the largest image bucket.

    A microbatch may meet a sample twice where one epoch ends and the next begins, and
    more often where it spans whole epochs.

    Args:
      counts: images of each sample.
      config: with the declared sizes.
      num_microbatches: of one step.

    Raises:
      ConfigError: with the most images that one sample, or one microbatch, may hold.
    """
    rows = config.batch_size // num_microbatches
    largest = config.image_buckets[-1]
    copies = (rows - 2) // len(counts) + 2
    fullest = heapq.nlargest(rows, counts)
    worst = sum([count for count in fullest for _ in range(copies)][:rows])
    if worst <= largest:
        return
    what = f"a sample has {max(counts)} images"
    if max(counts) <= largest:
        what = f"a microbatch of {rows} rows may hold {worst} images"
    raise errors.ConfigError(
        f"{what}; the largest of data.image_buckets={config.image_buckets} is "
        f"{largest}.\n  Add {worst} to --config.data.image_buckets, or raise "
        f"--config.pipeline.num_microbatches (now {num_microbatches})."
    )
