"""Text to token ids and back: bytes, or a `tokenizer.json`."""

import os
from typing import Protocol

import tokenizers

from rrfp_jax import errors

_EOS_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<eos>",
    "[EOS]",
    "[SEP]",
)
_PAD_NAMES = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>")


class Tokenizer(Protocol):
    """Maps text to ids in [0, vocab_size) and back; safe to use from threads."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def pad_id(self) -> int:
        """Fills positions that carry no text; never counts as a target."""

    @property
    def eos_id(self) -> int:
        """Ends a document or an answer."""

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the ids of all of `text`, without special tokens."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of `ids`, leaving special tokens out."""


class ByteTokenizer:
    """One token a byte (id = byte), and three special ids behind them."""

    pad_id = 256
    bos_id = 257
    eos_id = 258
    vocab_size = 259

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the UTF-8 bytes of `text`."""
        return list(text.encode() if isinstance(text, str) else text)

    def decode(self, ids: list[int]) -> str:
        """Returns the text; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class FileTokenizer:
    """A `tokenizer.json`, as written by Hugging Face's `tokenizers` library.

    Its own truncation and padding are switched off: samples are never cut here. The
    end token is the first known name in its vocabulary; where it has no padding token,
    the end token serves, which is safe because padding is never a target.

    Raises:
      ConfigError: when the file is missing, is no tokenizer or has no end token.
    """

    def __init__(self, path: str) -> None:
        if not os.path.isfile(path):
            raise errors.ConfigError(
                f"data.tokenizer={path!r} is neither 'bytes' nor a file.\n"
                "  Set --config.data.tokenizer to bytes or to a tokenizer.json."
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # The library raises bare `Exception`.
            raise errors.ConfigError(
                f"data.tokenizer={path!r} is not a tokenizer: {error}.\n"
                "  Set --config.data.tokenizer to a tokenizer.json of the tokenizers "
                "library."
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        eos_ids = [ids[name] for name in _EOS_NAMES if name in ids]
        if not eos_ids:
            raise errors.ConfigError(
                f"data.tokenizer={path!r} has no end token; looked for "
                f"{', '.join(_EOS_NAMES)}.\n  Add one of them to its added_tokens, or "
                "set --config.data.tokenizer to another file."
            )
        self.eos_id = eos_ids[0]
        pad_ids = [ids[name] for name in _PAD_NAMES if name in ids]
        self.pad_id = (pad_ids or eos_ids)[0]
        self.vocab_size = max(ids.values()) + 1

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the ids; bytes that are not UTF-8 are read as U+FFFD."""
        if isinstance(text, bytes):
            text = text.decode(errors="replace")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Returns the text of `ids`, leaving special tokens out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))


def open_tokenizer(name: str) -> Tokenizer:
    """Returns the tokenizer that `data.tokenizer` names.

    Args:
      name: "bytes", or the path of a `tokenizer.json`.

    Raises:
      ConfigError: when the file is not a tokenizer.
    """
    return ByteTokenizer() if name == "bytes" else FileTokenizer(name)


def check_vocabulary(tokenizer: Tokenizer, model_vocab_size: int) -> None:
    """Refuses a model whose embedding has no row for some token.

    Args:
      tokenizer: what produces the ids.
      model_vocab_size: rows of the model's embedding.

    Raises:
      ConfigError: when an id of the tokenizer is outside the model's vocabulary.
    """
    if tokenizer.vocab_size > model_vocab_size:
        raise errors.ConfigError(
            f"model.language.vocab_size={model_vocab_size} is smaller than the "
            f"tokenizer's vocabulary of {tokenizer.vocab_size}.\n"
            f"  Set --config.model.language.vocab_size to {tokenizer.vocab_size} or "
            "more, or --config.data.tokenizer to a smaller one."
        )
