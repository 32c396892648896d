"""One training example, and how text and images become one.

L: positions of the sample, image tokens included. T: tokens of one image.
H, W, C: height, width and channels in pixels.

This is the only home of the label shift: position l predicts token l + 1.
"""

# ruff: noqa: N815 - shape suffixes are attribute names here.
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from rrfp_jax.data import tokenizer as tokenizer_lib

IMAGE_PLACEHOLDER = "<image>"
"""Stands in a turn's text for the T tokens of the next image (LLaVA's notation)."""

Array = npt.NDArray[Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Sample:
    """One example, unpadded, with labels already shifted.

    Attributes:
      sample_id: index in its source.
      origin: where it comes from, for error messages.
      tokens_L: int32; image positions hold the padding id.
      labels_L: int32; the token after each position.
      mask_L: float32; 1 where the label counts, never on an image position.
      positions_L: int32; from 0 in each segment.
      segments_L: int32; from 1, ascending.
      images_HWC: uint8, in order of appearance.
      image_starts: position of the first token of each image.
    """

    sample_id: int
    origin: str
    tokens_L: Array
    labels_L: Array
    mask_L: Array
    positions_L: Array
    segments_L: Array
    images_HWC: tuple[Array, ...] = ()
    image_starts: tuple[int, ...] = ()

    @property
    def length(self) -> int:
        """L, in positions."""
        return len(self.tokens_L)


class SampleSource(Protocol):
    """Random access to samples; safe to read from threads, same index, same sample.

    No sample has more images than the largest of `image_counts`.
    """

    @property
    def image_counts(self) -> Sequence[int]:
        """Images of each sample, or one number that bounds them all; in any order."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclasses.dataclass(frozen=True)
class Turn:
    """A piece of a conversation; an answer is learned, and followed by the end token.

    Attributes:
      text: may hold `IMAGE_PLACEHOLDER`s.
      is_answer: whether the loss counts this turn's tokens.
    """

    text: str
    is_answer: bool


def encode_turns(
    turns: Sequence[Turn],
    images_HWC: Sequence[Array],
    tokenizer: tokenizer_lib.Tokenizer,
    tokens_per_image: int,
    sample_id: int,
    origin: str,
) -> Sample:
    """Encodes a conversation that ends with an answer.

    Args:
      turns: the conversation; its placeholders match `images_HWC` in number and order.
      images_HWC: uint8, all of the configured size.
      tokenizer: of the text.
      tokens_per_image: T.
      sample_id: index in its source.
      origin: where it comes from, for error messages.

    Returns:
      The sample, of one segment; the final end token is a label only.
    """
    assert turns[-1].is_answer, origin
    pieces = list(_pieces(turns, tokenizer, tokens_per_image))
    sizes = [len(piece.ids) for piece in pieces]
    ends = itertools.accumulate(sizes)
    starts = [
        end - tokens_per_image
        for end, piece in zip(ends, pieces, strict=True)
        if piece.is_image
    ]
    assert len(starts) == len(images_HWC), origin
    is_answer = np.repeat([piece.is_answer for piece in pieces], sizes)
    is_image = np.repeat([piece.is_image for piece in pieces], sizes)
    tokens = np.concatenate([np.asarray(piece.ids, np.int32) for piece in pieces])
    length = len(tokens) - 1
    return Sample(
        sample_id=sample_id,
        origin=origin,
        tokens_L=tokens[:-1],
        labels_L=tokens[1:],
        mask_L=(is_answer[1:] & ~is_image[:-1]).astype(np.float32),
        positions_L=np.arange(length, dtype=np.int32),
        segments_L=np.ones(length, np.int32),
        images_HWC=tuple(images_HWC),
        image_starts=tuple(starts),
    )


class _Piece(NamedTuple):
    ids: list[int]
    is_answer: bool
    is_image: bool


def _pieces(
    turns: Sequence[Turn],
    tokenizer: tokenizer_lib.Tokenizer,
    tokens_per_image: int,
) -> Iterator[_Piece]:
    """Yields text, images and end tokens in the order of the sample."""
    for turn in turns:
        for number, text in enumerate(turn.text.split(IMAGE_PLACEHOLDER)):
            if number > 0:
                yield _Piece([tokenizer.pad_id] * tokens_per_image, False, True)
            yield _Piece(tokenizer.encode(text), turn.is_answer, False)
        if turn.is_answer:
            yield _Piece([tokenizer.eos_id], True, False)
