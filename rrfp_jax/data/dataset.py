"""The entry of the package: a config in, batches out."""

import dataclasses
from collections.abc import Generator

from absl import logging

from rrfp_jax import errors
from rrfp_jax.data import buckets as buckets_lib
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import digits, llava, packed, text_files
from rrfp_jax.data import loader as loader_lib
from rrfp_jax.data import microbatch as microbatch_lib
from rrfp_jax.data import sample as sample_lib
from rrfp_jax.data import share as share_lib
from rrfp_jax.data import tokenizer as tokenizer_lib
from rrfp_jax.data import validate as validate_lib


@dataclasses.dataclass(frozen=True, eq=False)
class Data:
    """An open data set.

    Attributes:
      train: endless training batches; `close` it at the end.
      tokenizer: of all text.
      buckets: every shape that a microbatch can have, in training or evaluation.
      held_out: the evaluation samples; None where the user named none.
      config: what it was opened with.
      num_microbatches: of every whole batch.
      share: what of every batch is read.
    """

    train: loader_lib.Loader
    tokenizer: tokenizer_lib.Tokenizer
    buckets: list[buckets_lib.Bucket]
    held_out: sample_lib.SampleSource | None
    config: config_lib.DataConfig
    num_microbatches: int
    share: share_lib.Share

    def evaluation(
        self,
    ) -> Generator[list[microbatch_lib.Microbatch], None, None]:
        """Returns a fresh, finite iterator over the held-out samples, in order.

        Raises:
          ConfigError: when there are none.
        """
        if self.held_out is None:
            raise errors.ConfigError(
                f"data.eval_paths is empty, so data.source={self.config.source} has "
                "nothing to evaluate on.\n  Set --config.data.eval_paths to files or "
                "globs, or switch evaluation off."
            )
        return loader_lib.evaluation(
            self.held_out,
            self.config,
            self.num_microbatches,
            self.tokenizer.pad_id,
            self.share,
        )


def open_data(
    config: config_lib.DataConfig,
    num_microbatches: int,
    share: share_lib.Share = loader_lib.WHOLE,
) -> Data:
    """Opens, checks and starts to serve a data set; compiles nothing.

    Args:
      config: which data.
      num_microbatches: of one step, of all replicas together.
      share: what of every batch to read.

    Raises:
      ConfigError: for any fault of the config or of the user's files.
    """
    possible = buckets_lib.buckets(config, num_microbatches)
    tokenizer = tokenizer_lib.open_tokenizer(config.tokenizer)
    train = _open_source(config, tokenizer, config_lib.Split.TRAIN)
    held_out = None
    if config.eval_paths or not config.source.reads_paths:
        held_out = _open_source(config, tokenizer, config_lib.Split.EVAL)
    for source in (train, held_out):
        if source is not None:
            buckets_lib.check_images(source.image_counts, config, num_microbatches)
    logging.info(
        "data %s: %d training and %d evaluation samples; buckets %s",
        config.source,
        len(train),
        0 if held_out is None else len(held_out),
        possible,
    )
    return Data(
        train=loader_lib.Loader(
            train, config, num_microbatches, tokenizer.pad_id, share
        ),
        tokenizer=tokenizer,
        buckets=possible,
        held_out=held_out,
        config=config,
        num_microbatches=num_microbatches,
        share=share,
    )


def _open_source(
    config: config_lib.DataConfig,
    tokenizer: tokenizer_lib.Tokenizer,
    split: config_lib.Split,
) -> sample_lib.SampleSource:
    """Returns the samples of one split, checked as far as the config asks."""
    field = "paths" if split is config_lib.Split.TRAIN else "eval_paths"
    match config.source:
        case config_lib.DataSource.DIGITS:
            questions = digits.DigitsSource(config, tokenizer, split)
            buckets_lib.check_length(questions.longest_sample(), config)
            return questions
        case config_lib.DataSource.LLAVA:
            conversations = llava.LlavaSource(config, tokenizer, field)
            if config.validate:
                validate_lib.validate(conversations, config, f"data.{field}")
            return conversations
        case config_lib.DataSource.STDLIB:
            field = "source"
            library = text_files.stdlib_documents(split)
            documents = (tokenizer.encode(text) for text in library)
        case config_lib.DataSource.JSONL:
            texts = text_files.jsonl_documents(
                getattr(config, field), field, config.progress
            )
            documents = (tokenizer.encode(text) for text in texts)
    files = getattr(config, field) if config.source.reads_paths else ()
    return packed.PackedSource(
        documents, config.length_buckets[0], tokenizer.eos_id, field, files
    )
