import numpy as np
import pytest

from rrfp_jax import errors
from rrfp_jax.data import packed

EOS = 99


def test_windows_restart_segments_and_positions_at_each_document():
    source = packed.PackedSource([[1, 2], [3], [4, 5, 6, 7]], 4, EOS, "paths")
    rows = [
        (s.tokens_L, s.labels_L, s.mask_L, s.positions_L, s.segments_L)
        for s in (source[i] for i in range(len(source)))
    ]
    assert [[array.tolist() for array in row] for row in rows] == [
        [[1, 2, EOS, 3], [2, EOS, 3, EOS], [1, 1, 0, 1], [0, 1, 2, 0], [1, 1, 1, 2]],
        [[EOS, 4, 5, 6], [4, 5, 6, 7], [0, 1, 1, 1], [0, 0, 1, 2], [1, 2, 2, 2]],
        [[7], [EOS], [1], [0], [1]],
    ]


def test_every_token_but_the_first_of_a_document_is_learned_once():
    rng = np.random.default_rng(0)
    documents = [rng.integers(90, size=n).tolist() for n in rng.integers(30, size=40)]
    source = packed.PackedSource(documents, 16, EOS, "paths")
    learned = [
        int(label)
        for sample in (source[i] for i in range(len(source)))
        for label, mask in zip(sample.labels_L, sample.mask_L, strict=True)
        if mask
    ]
    assert learned == [t for ids in documents for t in [*ids, EOS][1:]]


def test_all_windows_but_the_last_are_full():
    source = packed.PackedSource([[1] * 20, [2] * 20], 8, EOS, "paths")
    lengths = [source[i].length for i in range(len(source))]
    assert lengths == [8, 8, 8, 8, 8, 1]


@pytest.mark.parametrize("documents", [[], [[], []]])
def test_documents_without_text_are_refused(documents: list[list[int]]):
    with pytest.raises(errors.ConfigError) as caught:
        packed.PackedSource(documents, 8, EOS, "eval_paths")
    assert f"no text in its {len(documents)} documents" in str(caught.value)
    assert "--config.data.eval_paths" in str(caught.value)
