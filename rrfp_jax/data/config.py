"""The validated description of a data set: which samples, which shapes.

The only home of the data defaults. Checks here need no file; those that read files
live with their readers.
"""

import dataclasses
import enum

from rrfp_jax import errors

DIGIT_PIXELS = 8
"""Height and width of scikit-learn's digit images, before upscaling."""


class DataSource(enum.StrEnum):
    """Where the samples come from."""

    DIGITS = "digits"
    STDLIB = "stdlib"
    JSONL = "jsonl"
    LLAVA = "llava"

    @property
    def has_images(self) -> bool:
        """Whether samples may hold images; the others are packed text."""
        return self in (DataSource.DIGITS, DataSource.LLAVA)

    @property
    def reads_paths(self) -> bool:
        """Whether the samples are in files that the user names."""
        return self in (DataSource.JSONL, DataSource.LLAVA)


class Split(enum.StrEnum):
    """Training samples, or those held out for evaluation."""

    TRAIN = "train"
    EVAL = "eval"


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which data, in which shapes; validated when built.

    Lists become tuples and a string becomes a `DataSource`, so the values of a
    ConfigDict may be passed as they are.

    Attributes:
      source: where samples come from.
      batch_size: samples of one step, over all microbatches; for packed text, rows.
      length_buckets: allowed row lengths in tokens, ascending; an image counts
        `tokens_per_image` of them. Packed text has exactly one.
      image_buckets: allowed image slots of one *microbatch*, ascending. A microbatch
        without an image has 0 slots, whether or not 0 is listed.
      image_size: (height, width) in pixels that every image is scaled to.
      channels: 1 (gray) or 3 (RGB).
      patch_size: side in pixels of the square patch that makes one image token.
      max_images_per_sample: the most images of one `digits` question.
      paths: files or globs of the training samples (`jsonl`, `llava`).
      eval_paths: the same for evaluation; empty means that there is none.
      image_folder: what the image paths of `llava` records are relative to.
      tokenizer: "bytes", or the path of a `tokenizer.json`.
      seed: of the order of samples, and of the `digits` questions; below 2**32.
      num_workers: prefetching threads; 0 prepares each batch when it is asked for.
      prefetch: batches prepared ahead.
      validate: whether to read every sample once before training (`llava`).
      progress: whether to show progress bars, on a terminal, while reading.

    Raises:
      ConfigError: when a value is illegal, or names what the source does not use.
    """

    source: DataSource
    batch_size: int
    length_buckets: tuple[int, ...]
    image_buckets: tuple[int, ...] = (0,)
    image_size: tuple[int, int] = (16, 16)
    channels: int = 1
    patch_size: int = 4
    max_images_per_sample: int = 2
    paths: tuple[str, ...] = ()
    eval_paths: tuple[str, ...] = ()
    image_folder: str = ""
    tokenizer: str = "bytes"
    seed: int = 0
    num_workers: int = 2
    prefetch: int = 4
    validate: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        _coerce(self)
        _check_counts(self)
        _check_ascending(self.length_buckets, "length_buckets", smallest=1)
        _check_ascending(self.image_buckets, "image_buckets", smallest=0)
        _check_source(self)
        if self.source.has_images:
            _check_images(self)
            _check_image_fits(self)
        else:
            _check_packed(self)

    @property
    def tokens_per_image(self) -> int:
        """T: patches of one image, each of which is one position of the row."""
        height, width = self.image_size
        return (height // self.patch_size) * (width // self.patch_size)


def check_num_microbatches(
    batch_size: int, num_microbatches: int, num_replicas: int = 1
) -> None:
    """Refuses a number of microbatches that would leave some with fewer rows.

    Args:
      batch_size: samples of one step.
      num_microbatches: microbatches of one step, of each replica.
      num_replicas: data-parallel replicas.

    Raises:
      ConfigError: when it does not divide the batch; names the nearest that do.
    """
    if batch_size % num_replicas:
        raise errors.ConfigError(
            f"mesh.replicas={num_replicas} does not divide "
            f"data.batch_size={batch_size}.\n"
            "  Set --config.data.batch_size to a multiple of it."
        )
    batch_size //= num_replicas
    if num_microbatches >= 1 and batch_size % num_microbatches == 0:
        return
    legal = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    below = [d for d in legal if d < num_microbatches][-1:]
    above = [d for d in legal if d > num_microbatches][:1]
    nearest = " or ".join(str(d) for d in below + above)
    of_each = f" of each of {num_replicas} replicas" if num_replicas > 1 else ""
    raise errors.ConfigError(
        f"pipeline.num_microbatches={num_microbatches} does not divide "
        f"data.batch_size={batch_size}{of_each}.\n"
        f"  Set --config.pipeline.num_microbatches to {nearest}."
    )


def _coerce(config: DataConfig) -> None:
    try:
        object.__setattr__(config, "source", DataSource(config.source))
    except ValueError:
        known = ", ".join(DataSource)
        raise errors.ConfigError(
            f"data.source={config.source!r} is not a known source.\n"
            f"  Set --config.data.source to one of {known}."
        ) from None
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, list):
            object.__setattr__(config, field.name, tuple(value))


def _check_counts(config: DataConfig) -> None:
    smallest = {
        "batch_size": 1,
        "patch_size": 1,
        "max_images_per_sample": 1,
        "seed": 0,
        "num_workers": 0,
        "prefetch": 0,
    }
    for name, least in smallest.items():
        value = getattr(config, name)
        if value < least:
            raise errors.ConfigError(
                f"data.{name}={value} is less than {least}.\n"
                f"  Set --config.data.{name} to {least} or more."
            )
    if config.seed >= 2**32:
        raise errors.ConfigError(
            f"data.seed={config.seed} does not fit in 32 bits.\n"
            f"  Set --config.data.seed to less than {2**32}."
        )


def _check_ascending(values: tuple[int, ...], name: str, smallest: int) -> None:
    legal = sorted({value for value in values if value >= smallest})
    if values and list(values) == legal:
        return
    remedy = f"e.g. {tuple(legal)}" if legal else "at least one size"
    raise errors.ConfigError(
        f"data.{name}={values} is not an ascending list of sizes of at least "
        f"{smallest}.\n  Set --config.data.{name} to {remedy}."
    )


def _check_source(config: DataConfig) -> None:
    if config.source.reads_paths and not config.paths:
        raise errors.ConfigError(
            f"data.paths is empty, and data.source={config.source} reads its samples "
            "from files.\n  Set --config.data.paths to files or globs."
        )
    readers = {
        "paths": (DataSource.JSONL, DataSource.LLAVA),
        "eval_paths": (DataSource.JSONL, DataSource.LLAVA),
        "image_folder": (DataSource.LLAVA,),
    }
    for name, sources in readers.items():
        value = getattr(config, name)
        if value and config.source not in sources:
            raise errors.ConfigError(
                f"data.{name}={value!r} is set, but data.source={config.source} does "
                f"not read it.\n  Leave --config.data.{name} empty, or set "
                f"--config.data.source to {' or '.join(sources)}."
            )


def _check_images(config: DataConfig) -> None:
    if config.channels not in (1, 3):
        raise errors.ConfigError(
            f"data.channels={config.channels} is neither gray nor RGB.\n"
            "  Set --config.data.channels to 1 or 3."
        )
    unit = config.patch_size
    if not _is_multiple(config.image_size, unit):
        raise errors.ConfigError(
            f"data.patch_size={unit} does not cut data.image_size={config.image_size} "
            "into whole patches.\n  Set both sides of --config.data.image_size to "
            f"multiples of {unit}, or change --config.data.patch_size."
        )
    if config.source is DataSource.DIGITS and not _is_multiple(
        config.image_size, DIGIT_PIXELS
    ):
        raise errors.ConfigError(
            f"data.image_size={config.image_size} is not a whole multiple of the "
            f"{DIGIT_PIXELS}x{DIGIT_PIXELS} digits.\n  Set both sides of "
            f"--config.data.image_size to multiples of {DIGIT_PIXELS}."
        )


def _check_image_fits(config: DataConfig) -> None:
    num_tokens, longest = config.tokens_per_image, config.length_buckets[-1]
    if config.image_buckets[-1] > 0 and longest <= num_tokens:
        raise errors.ConfigError(
            f"data.length_buckets={config.length_buckets} cannot hold an image and its "
            f"text: one image takes {num_tokens} positions.\n  Add a size of more than "
            f"{num_tokens} to --config.data.length_buckets, or raise "
            "--config.data.patch_size."
        )


def _check_packed(config: DataConfig) -> None:
    if len(config.length_buckets) > 1:
        raise errors.ConfigError(
            f"data.length_buckets={config.length_buckets} has several sizes, but "
            f"data.source={config.source} is packed into rows of one length.\n"
            f"  Set --config.data.length_buckets to ({config.length_buckets[-1]},)."
        )
    if config.image_buckets != (0,):
        raise errors.ConfigError(
            f"data.image_buckets={config.image_buckets} has image slots, but "
            f"data.source={config.source} is text only.\n"
            "  Set --config.data.image_buckets to (0,)."
        )


def _is_multiple(sides: tuple[int, int], unit: int) -> bool:
    return all(side >= unit and side % unit == 0 for side in sides)
