"""Batches from samples, in a reproducible order, prepared ahead by grain's threads.

Everything is a function of (seed, batch number), so the position in the data is one
number and resuming is exact: also in other processes, since whatever share of the
batches a process reads, it reads them at the same pace.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Generator, Iterator
from typing import Any, Self

import grain

from rrfp_jax import errors
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import microbatch as microbatch_lib
from rrfp_jax.data import sample as sample_lib
from rrfp_jax.data.share import Share

WHOLE = Share()


class Loader:
    """Endless training batches: an epoch is a permutation, and none is cut short.

    A batch may span two epochs. Not thread-safe; one consumer. Threads prepare the
    next `config.prefetch` batches meanwhile; `close` (or `with`) ends them.

    Args:
      source: the samples; at least one.
      config: batch size, seed, buckets, prefetching.
      num_microbatches: of each whole batch.
      pad_id: the token on padding positions.
      share: what of each batch is read; the microbatches are those of it.
    """

    def __init__(
        self,
        source: sample_lib.SampleSource,
        config: config_lib.DataConfig,
        num_microbatches: int,
        pad_id: int,
        share: Share = WHOLE,
    ) -> None:
        order = grain.MapDataset.source(source).seed(config.seed).shuffle().repeat()
        batches = _batches(order, config, num_microbatches, pad_id, share)
        self._iterator = iter(batches)
        self._order: dict[str, Any] = {
            "source": str(config.source),
            "seed": config.seed,
            "batch_size": config.batch_size,
            "num_samples": len(source),
        }

    def __iter__(self) -> Iterator[list[microbatch_lib.Microbatch]]:
        return self

    def __next__(self) -> list[microbatch_lib.Microbatch]:
        """Returns the microbatches of the next step.

        Raises:
          ConfigError: for bad data that no check ahead has found.
        """
        batch: list[microbatch_lib.Microbatch] = next(self._iterator)
        return batch

    def state(self) -> dict[str, Any]:
        """Returns where the next batch is; survives JSON, independent of M."""
        return {
            "order": dict(self._order),
            "iterator": copy.deepcopy(self._iterator.get_state()),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues exactly where `state` was taken.

        Raises:
          ConfigError: when this loader's order of samples is another one.
        """
        for name, value in self._order.items():
            saved = state["order"][name]
            if saved == value:
                continue
            if name == "num_samples":
                raise errors.ConfigError(
                    f"the checkpoint was written with {saved} samples; the data now "
                    f"has {value}.\n  Restore the data, --config.data.paths or "
                    "--config.data.length_buckets, or start in another --workdir."
                )
            raise errors.ConfigError(
                f"the checkpoint was written with data.{name}={saved}; it is now "
                f"{value}.\n  Set --config.data.{name} to {saved}, or start in "
                "another --workdir."
            )
        self._iterator.set_state(copy.deepcopy(state["iterator"]))

    def close(self) -> None:
        """Ends the prefetching threads, each after the batch it is at."""
        self._iterator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluation(
    source: sample_lib.SampleSource,
    config: config_lib.DataConfig,
    num_microbatches: int,
    pad_id: int,
    share: Share = WHOLE,
) -> Generator[list[microbatch_lib.Microbatch], None, None]:
    """Yields every sample once, in order; masked rows fill up the last batch.

    Args:
      source: the held-out samples.
      config: batch size, buckets, prefetching.
      num_microbatches: of each whole batch.
      pad_id: the token on padding positions.
      share: what of each batch is read. Shares may differ in how many batches they
        have, by one.
    """
    order = grain.MapDataset.source(source)
    batches = iter(_batches(order, config, num_microbatches, pad_id, share))
    with contextlib.closing(batches):
        yield from batches


def _batches(
    order: grain.MapDataset,
    config: config_lib.DataConfig,
    num_microbatches: int,
    pad_id: int,
    share: Share,
) -> grain.IterDataset:
    """Returns the data set of lists of microbatches, one for each step."""
    count = share.of(num_microbatches)
    ours = dataclasses.replace(config, batch_size=share.of(config.batch_size))

    def cut(samples: list[sample_lib.Sample]) -> list[microbatch_lib.Microbatch]:
        return microbatch_lib.microbatches(samples, count, ours, pad_id)

    order = share.select(order, config.batch_size)
    batches = order.batch(ours.batch_size, drop_remainder=False, batch_fn=list)
    return batches.map(cut).to_iter_dataset(
        grain.ReadOptions(
            num_threads=config.num_workers if config.prefetch else 0,
            prefetch_buffer_size=config.prefetch if config.num_workers else 0,
        )
    )
