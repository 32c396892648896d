"""Documents packed into windows of one length, without waste or truncation.

L: positions of a window. S: tokens of all documents, each followed by the end token.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rrfp_jax import errors
from rrfp_jax.data import sample as sample_lib


class PackedSource:
    """Windows of L positions over the concatenated documents.

    A document may span windows. Each part of one is a segment of its window, with
    positions from 0 and attention to itself only, so a label that starts another
    document is masked. Window i predicts tokens i*L+1 .. (i+1)*L of the stream, hence
    every token but the first of each document is learned exactly once an epoch. The
    last window may be shorter.

    All tokens are kept in memory, 4 bytes each.

    Args:
      documents: token ids of each document, without end token.
      length: L.
      eos_id: ends each document.
      field: of `DataConfig`, names the documents in messages.
      files: what that field says, where it names files.

    Raises:
      ConfigError: when no document has a token.
    """

    image_counts: Sequence[int] = (0,)

    def __init__(
        self,
        documents: Iterable[list[int]],
        length: int,
        eos_id: int,
        field: str,
        files: Sequence[str] = (),
    ) -> None:
        parts = [np.asarray([*ids, eos_id], np.int32) for ids in documents]
        if all(len(part) == 1 for part in parts):
            named = f" ({', '.join(files)})" if files else ""
            raise errors.ConfigError(
                f"data.{field} has no text in its {len(parts)} documents{named}.\n"
                f'  Name files with lines of {{"text": ...}} in --config.data.{field}.'
            )
        self._tokens_S = np.concatenate(parts)
        self._ends = np.cumsum([len(part) for part in parts])
        self._length = length
        self._field = field

    def __len__(self) -> int:
        return math.ceil((len(self._tokens_S) - 1) / self._length)

    def __getitem__(self, index: int) -> sample_lib.Sample:
        start = index * self._length
        end = min(start + self._length, len(self._tokens_S) - 1)
        tokens = self._tokens_S[start : end + 1]
        document = np.searchsorted(self._ends, np.arange(start, end + 1), side="right")
        segments_L = (document[:-1] - document[0] + 1).astype(np.int32)
        first_L = np.searchsorted(segments_L, segments_L, side="left")
        return sample_lib.Sample(
            sample_id=index,
            origin=f"data.{self._field}, window {index}",
            tokens_L=tokens[:-1],
            labels_L=tokens[1:],
            mask_L=(document[:-1] == document[1:]).astype(np.float32),
            positions_L=(np.arange(end - start) - first_L).astype(np.int32),
            segments_L=segments_L,
        )
