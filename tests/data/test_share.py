"""Each process reads its blocks of every batch, and no others."""

import itertools

import grain
import pytest

from rrfp_jax.data.share import Share
from rrfp_jax.errors import ConfigError


def select(share: Share, count: int, batch_size: int) -> list[int]:
    chosen = share.select(grain.MapDataset.source(range(count)), batch_size)
    return [chosen[i] for i in range(len(chosen))]


def test_a_share_is_the_same_blocks_of_every_batch():
    assert select(Share((1,), 2), 12, 4) == [2, 3, 6, 7, 10, 11]
    assert select(Share((0, 2), 4), 16, 8) == [0, 1, 4, 5, 8, 9, 12, 13]


def test_all_shares_together_are_the_batches():
    parts = [select(Share((q,), 3), 24, 6) for q in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(24))


@pytest.mark.parametrize("count", range(1, 13))
def test_the_last_batch_is_shared_out_as_far_as_it_goes(count: int):
    parts = [select(Share((q,), 3), count, 6) for q in range(3)]
    assert sorted(itertools.chain(*parts)) == list(range(count))
    assert all(part == sorted(part) for part in parts)


def test_it_is_read_without_end_as_what_it_is_a_share_of():
    order = grain.MapDataset.source(range(8)).repeat()
    chosen = Share((1,), 2).select(order, 4)
    assert [chosen[i] for i in range(6)] == [2, 3, 6, 7, 2, 3]


def test_its_part_of_rows_and_microbatches():
    assert Share((0, 2), 4).of(16) == 8
    assert Share().of(16) == 16
    assert Share().is_whole


@pytest.mark.parametrize("parts", [(), (2,), (-1,)])
def test_a_block_that_is_none_is_refused(parts: tuple[int, ...]):
    with pytest.raises(ConfigError, match="of 2 parts"):
        Share(parts, 2)
