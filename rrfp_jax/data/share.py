"""Which part of every batch a process reads: that of its data-parallel replicas.

A batch is cut into equal blocks of rows, one for each replica, in order. A process
reads the blocks of the replicas that it has a part in and no others; what the whole
batch is depends on neither.
"""

import dataclasses
from typing import Any

import grain

from rrfp_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Share:
    """Some blocks of each batch.

    Attributes:
      parts: the blocks, ascending.
      num_parts: of a batch.

    Raises:
      ConfigError: there is no such block.
    """

    parts: tuple[int, ...] = (0,)
    num_parts: int = 1

    def __post_init__(self) -> None:
        if not self.parts or not set(self.parts) <= set(range(self.num_parts)):
            raise ConfigError(
                f"share {self.parts} of {self.num_parts} parts of a batch.\n"
                "  Name some of them, counted from 0."
            )

    @property
    def is_whole(self) -> bool:
        """Whether it is all of each batch."""
        return len(self.parts) == self.num_parts

    def of(self, count: int) -> int:
        """Returns its part of what is equal in all blocks: rows, microbatches."""
        return count * len(self.parts) // self.num_parts

    def select(self, order: grain.MapDataset, batch_size: int) -> grain.MapDataset:
        """Returns the samples of its blocks, in order.

        Args:
          order: the samples of one batch after another.
          batch_size: of whole batches.
        """
        if self.is_whole:
            return order
        return grain.MapDataset.source(_Blocks(order, self, batch_size))


class _Blocks:
    """Looks samples up by their position in the share."""

    def __init__(self, order: grain.MapDataset, share: Share, batch_size: int) -> None:
        self._order = order
        self._parts = share.parts
        self._batch_size = batch_size
        self._rows = batch_size // share.num_parts  # of a block

    def __len__(self) -> int:
        """Returns how many samples there are: of the last batch, perhaps not all."""
        num_batches, rest = divmod(len(self._order), self._batch_size)
        last = (rest - part * self._rows for part in self._parts)
        return num_batches * self._rows * len(self._parts) + sum(
            min(max(rows, 0), self._rows) for rows in last
        )

    def __getitem__(self, index: int) -> Any:
        batch, row = divmod(index, self._rows * len(self._parts))
        block, within = divmod(row, self._rows)
        first = batch * self._batch_size + self._parts[block] * self._rows
        return self._order[first + within]
