import numpy as np

from rrfp_jax.data import sample as sample_lib
from rrfp_jax.data import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.ByteTokenizer()
PAD, EOS = TOKENIZER.pad_id, TOKENIZER.eos_id


def _encode(*turns: tuple[str, bool], num_images: int = 0) -> sample_lib.Sample:
    return sample_lib.encode_turns(
        [sample_lib.Turn(text, is_answer) for text, is_answer in turns],
        [np.zeros((8, 8, 1), np.uint8)] * num_images,
        TOKENIZER,
        tokens_per_image=2,
        sample_id=3,
        origin="here",
    )


def test_labels_are_the_next_tokens_and_only_answers_count():
    sample = _encode(("ab", False), ("c", True), ("d", False), ("e", True))
    a, b, c, d, e = map(ord, "abcde")
    assert sample.tokens_L.tolist() == [a, b, c, EOS, d, e]
    assert sample.labels_L.tolist() == [b, c, EOS, d, e, EOS]
    assert sample.mask_L.tolist() == [0, 1, 1, 0, 1, 1]
    assert sample.positions_L.tolist() == [0, 1, 2, 3, 4, 5]
    assert sample.segments_L.tolist() == [1] * 6


def test_images_take_their_tokens_where_the_placeholders_stand():
    sample = _encode(("<image>a<image>", False), ("b", True), num_images=2)
    a, b = map(ord, "ab")
    assert sample.tokens_L.tolist() == [PAD, PAD, a, PAD, PAD, b]
    assert sample.image_starts == (0, 3)
    assert sample.length == 6


def test_an_image_position_never_counts_for_the_loss():
    """Not even the last one, right before an answer; nor within an answer."""
    sample = _encode(("<image>", False), ("b<image>c", True), num_images=2)
    assert sample.tokens_L.tolist() == [PAD, PAD, ord("b"), PAD, PAD, ord("c")]
    assert sample.mask_L.tolist() == [0, 0, 0, 0, 0, 1]


def test_types_are_those_of_the_contract():
    sample = _encode(("a", False), ("b", True))
    assert sample.tokens_L.dtype == sample.labels_L.dtype == np.int32
    assert sample.positions_L.dtype == sample.segments_L.dtype == np.int32
    assert sample.mask_L.dtype == np.float32
