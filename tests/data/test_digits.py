import collections
import re

import numpy as np
import pytest

from rrfp_jax.data import config as config_lib
from rrfp_jax.data import digits
from rrfp_jax.data import sample as sample_lib
from rrfp_jax.data import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.ByteTokenizer()


def _source(config: config_lib.DataConfig, split: str) -> digits.DigitsSource:
    return digits.DigitsSource(config, TOKENIZER, config_lib.Split(split))


def _question(sample: sample_lib.Sample) -> str:
    return TOKENIZER.decode(sample.tokens_L.tolist()).split("\n")[0]


def _answer(sample: sample_lib.Sample) -> str:
    ids = sample.labels_L[sample.mask_L > 0].tolist()
    assert ids[-1] == TOKENIZER.eos_id
    return TOKENIZER.decode(ids)


@pytest.fixture
def names(digits_config) -> dict[bytes, str]:
    """The digit of each held-out image, from the questions that ask for just that."""
    source = _source(digits_config(), "eval")
    samples = [source[i] for i in range(len(source) // 2)]
    assert {_question(s) for s in samples} <= set(digits.IDENTIFY.phrasings)
    return {s.images_HWC[0].tobytes(): _answer(s) for s in samples}


def test_answers_follow_from_the_images(digits_config, names):
    """Read back from the arrays alone, for every kind of question about images."""
    source = _source(digits_config(max_images_per_sample=4), "eval")
    asked = collections.Counter()
    for sample in (source[i] for i in range(len(source) // 2, len(source))):
        shown = [int(names[i.tobytes()]) for i in sample.images_HWC]
        question = _question(sample)
        for kind in (digits.PARITY, digits.LARGER, digits.COUNT, digits.READ_ALL):
            if question in kind.phrasings:
                expected = {
                    digits.PARITY: ("yes", "no")[shown[0] % 2],
                    digits.LARGER: str(max(shown)),
                    digits.COUNT: str(len(shown)),
                    digits.READ_ALL: "".join(map(str, shown)),
                }[kind]
                assert _answer(sample) == expected
                asked[kind] += 1
    assert len(asked) == 4
    assert sum(asked.values()) == len(source) // 2


def test_a_question_without_an_image_answers_from_its_text(digits_config):
    source = _source(digits_config(), "train")
    textual = [s for s in (source[i] for i in range(300)) if not s.images_HWC]
    for sample in textual:
        number = int(re.findall(r"\d", _question(sample))[0])
        assert _answer(sample) == str(number + 1)
    assert textual


def test_naming_one_digit_is_asked_most_and_any_number_of_images_occurs(
    digits_config,
):
    source = _source(digits_config(max_images_per_sample=4), "train")
    samples = [source[i] for i in range(600)]
    counts = collections.Counter(len(sample.images_HWC) for sample in samples)
    named = sum(_question(sample) in digits.IDENTIFY.phrasings for sample in samples)
    assert set(counts) == {0, 1, 2, 3, 4}
    assert named > 220
    assert set(digits.IDENTIFY.phrasings) <= {_question(s) for s in samples}


def test_a_limit_of_one_image_is_kept(digits_config):
    source = _source(digits_config(max_images_per_sample=1), "train")
    assert {len(source[i].images_HWC) for i in range(200)} == {0, 1}


def test_every_evaluation_question_shows_a_held_out_image_and_training_none(
    digits_config,
):
    train = _source(digits_config(), "train")
    held_out = _source(digits_config(), "eval")
    learned = {i.tobytes() for n in range(3000) for i in train[n].images_HWC}
    for n in range(len(held_out)):
        images = {image.tobytes() for image in held_out[n].images_HWC}
        assert images
        assert not images & learned


def test_evaluation_asks_first_for_each_held_out_digit_and_then_more(digits_config):
    source = _source(digits_config(), "eval")
    samples = [source[i] for i in range(len(source))]
    half = len(samples) // 2
    named = [_question(s) in digits.IDENTIFY.phrasings for s in samples]
    assert named == [True] * half + [False] * half
    for first, second in zip(samples[:half], samples[half:], strict=True):
        np.testing.assert_array_equal(first.images_HWC[0], second.images_HWC[0])
    assert {len(s.images_HWC) for s in samples[half:]} == {1, 2}


def test_questions_follow_from_seed_and_index(digits_config):
    def story(seed: int, split: str) -> list[tuple[bytes, ...]]:
        source = _source(digits_config(seed=seed), split)
        samples = [source[i] for i in range(40)]
        return [(s.tokens_L.tobytes(), *map(bytes, s.images_HWC)) for s in samples]

    assert story(1, "train") == story(1, "train")
    assert story(1, "train") != story(2, "train")
    assert story(1, "eval") == story(2, "eval")


def test_images_are_upscaled_by_whole_factors_and_repeated_over_channels(digits_config):
    small = _source(digits_config(), "eval")[0].images_HWC[0]
    config = digits_config(image_size=(16, 24), channels=3, length_buckets=(128,))
    large = _source(config, "eval")[0].images_HWC[0]
    assert small.shape == (8, 8, 1)
    assert large.shape == (16, 24, 3)
    assert large.dtype == np.uint8
    assert small.max() == 255
    for row, column, channel in ((0, 0, 0), (1, 2, 1)):
        part = large[row::2, column::3, channel]
        np.testing.assert_array_equal(part, small[..., 0])


def test_no_question_is_longer_than_the_longest(digits_config):
    for most in (1, 2, 5):
        config = digits_config(max_images_per_sample=most)
        longest = _source(config, "train").longest_sample().length
        lengths = [_source(config, "train")[0].length]
        for split in ("train", "eval"):
            source = _source(config, split)
            lengths += [source[i].length for i in range(300)]
        assert max(lengths) <= longest
