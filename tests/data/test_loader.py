import itertools
import json
import threading

import numpy as np
import pytest

from rrfp_jax import errors
from rrfp_jax.data import loader as loader_lib
from rrfp_jax.data import packed


def _source(num_windows: int = 10) -> packed.PackedSource:
    """Windows of 8 in which every token is another one."""
    return packed.PackedSource([list(range(8 * num_windows))], 8, 999, "paths")


def _loader(config, num_microbatches=2, source=None) -> loader_lib.Loader:
    return loader_lib.Loader(source or _source(), config, num_microbatches, pad_id=0)


def _take(batches, count):
    """The contents of some batches, comparable with ==."""
    return [
        [
            (part.sample_ids, *(array.tobytes() for array in part.arrays.values()))
            for part in batch
        ]
        for batch in itertools.islice(batches, count)
    ]


def _ids(batch):
    return [i for part in batch for i in part.sample_ids]


@pytest.fixture
def config(text_config):
    return text_config(source="stdlib")


def test_an_epoch_shows_each_sample_once_and_the_next_in_another_order(config):
    with _loader(config) as loader:
        ids = [i for _ in range(5) for i in _ids(next(loader))]
    first, second = ids[:10], ids[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first != sorted(first)


def test_the_same_seed_gives_the_same_batches(text_config):
    def story(seed, **fields):
        config = text_config(source="stdlib", seed=seed, **fields)
        with _loader(config) as loader:
            return _take(loader, 8)

    assert story(0) == story(0, num_workers=0) == story(0, prefetch=1, num_workers=3)
    assert story(0) != story(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_continues_bitwise_equal(text_config, num_workers: int):
    config = text_config(source="stdlib", num_workers=num_workers)
    with _loader(config) as loader:
        next(loader)
        next(loader)
        next(loader)
        state = json.loads(json.dumps(loader.state()))
        expected = _take(loader, 7)
        loader.restore(state)
        assert _take(loader, 7) == expected
    with _loader(config) as fresh:
        fresh.restore(state)
        assert _take(fresh, 7) == expected


def test_a_state_is_not_changed_by_going_on(config):
    with _loader(config) as loader:
        state = loader.state()
        before = json.dumps(state)
        next(loader)
        assert json.dumps(state) == before
        assert json.dumps(loader.state()) != before


def test_resuming_with_other_microbatches_gives_the_same_samples(config):
    """C18: the position in the data does not depend on how a batch is cut."""
    with _loader(config, 2) as loader:
        next(loader)
        state = loader.state()
        expected = [_ids(next(loader)) for _ in range(4)]
    with _loader(config, 4) as other:
        other.restore(state)
        assert [_ids(next(other)) for _ in range(4)] == expected


@pytest.mark.parametrize(
    ("fields", "num_windows", "parts"),
    [
        ({"seed": 5}, 10, ["data.seed=5", "now 0", "--config.data.seed to 5"]),
        ({"batch_size": 8}, 10, ["data.batch_size=8", "--config.data.batch_size to 8"]),
        ({}, 11, ["11 samples", "has 10", "--config.data.paths"]),
    ],
)
def test_resuming_in_another_order_of_samples_is_refused(
    text_config, fields, num_windows: int, parts: list[str]
):
    written = text_config(source="stdlib", **fields)
    with _loader(written, source=_source(num_windows)) as loader:
        state = loader.state()
    with (
        _loader(text_config(source="stdlib")) as loader,
        pytest.raises(errors.ConfigError) as caught,
    ):
        loader.restore(state)
    for part in parts:
        assert part in str(caught.value)


def test_threads_prepare_batches_ahead_and_end_at_close(config):
    before = set(threading.enumerate())
    loader = _loader(config)
    next(loader)
    threads = set(threading.enumerate()) - before
    assert threads
    loader.close()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_bad_data_met_by_a_thread_is_raised_to_the_consumer(config):
    class Bad(packed.PackedSource):
        def __getitem__(self, index):
            raise errors.ConfigError(f"sample {index} is bad")

    bad = Bad([[1, 2, 3]], 8, 999, "paths")
    with (
        _loader(config, source=bad) as loader,
        pytest.raises(errors.ConfigError, match="sample 0 is bad"),
    ):
        next(loader)


def test_evaluation_is_in_order_complete_and_padded(config):
    batches = list(loader_lib.evaluation(_source(), config, 2, pad_id=0))
    assert [[part.sample_ids for part in batch] for batch in batches] == [
        [(0, 1), (2, 3)],
        [(4, 5), (6, 7)],
        [(8, 9), (-1, -1)],
    ]
    assert sum(part.num_tokens for batch in batches for part in batch) == 80
    last = batches[-1][-1]
    assert last.num_tokens == 0
    assert not last.arrays["mask_BL"].any()
    assert not last.arrays["segment_ids_BL"].any()
    assert last.arrays["tokens_BL"].shape == batches[0][0].arrays["tokens_BL"].shape


def test_evaluation_may_be_left_early(config):
    before = set(threading.enumerate())
    batches = loader_lib.evaluation(_source(), config, 2, pad_id=0)
    next(batches)
    threads = set(threading.enumerate()) - before
    batches.close()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_labels_come_through_unshuffled_within_a_row(config):
    with _loader(config) as loader:
        for part in next(loader):
            shifted = part.arrays["tokens_BL"][:, 1:]
            np.testing.assert_array_equal(part.arrays["labels_BL"][:, :-1], shifted)
