"""Questions about handwritten digits: a multimodal data set that needs no download.

The images are scikit-learn's `load_digits` (UCI, 1797 images of 8x8). Every question
follows from (seed, index), so the source is random access and an epoch is only a round
number. The last fifth of the images is held out: no training question shows them, and
every evaluation question does.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from sklearn import datasets

from rrfp_jax.data import config as config_lib
from rrfp_jax.data import sample as sample_lib
from rrfp_jax.data import tokenizer as tokenizer_lib

EPOCH = 1 << 16
"""Training questions before they repeat, in another order."""

_HELD_OUT_SHARE = 0.2
_EVAL_SEED = 0  # Evaluation asks the same whatever the training seed.


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of question.

    Attributes:
      phrasings: ways to ask it; `{}` stands for the digit of a question without images.
      min_images: fewest images.
      max_images: most images; None for as many as the config allows.
      weight: how often training asks it, relative to the other kinds.
      answer: from the digits shown, or of the text.
    """

    phrasings: tuple[str, ...]
    min_images: int
    max_images: int | None
    weight: float
    answer: Callable[[Sequence[int]], str]


# Naming one digit is asked most, so that a tiny model learns it within minutes.
IDENTIFY = Kind(
    ("Which digit is this?", "What digit do you see?", "Read the digit."),
    min_images=1,
    max_images=1,
    weight=0.45,
    answer=lambda digits: str(digits[0]),
)
PARITY = Kind(
    ("Is it even?", "Is this digit even?"),
    min_images=1,
    max_images=1,
    weight=0.1,
    answer=lambda digits: "no" if digits[0] % 2 else "yes",
)
LARGER = Kind(
    ("Which is larger?", "What is the larger digit?"),
    min_images=2,
    max_images=2,
    weight=0.1,
    answer=lambda digits: str(max(digits)),
)
COUNT = Kind(
    ("How many digits are there?", "Count the digits."),
    min_images=1,
    max_images=None,
    weight=0.1,
    answer=lambda digits: str(len(digits)),
)
READ_ALL = Kind(
    ("Read all digits.", "Which digits are these?"),
    min_images=2,
    max_images=None,
    weight=0.15,
    answer=lambda digits: "".join(map(str, digits)),
)
SUCCESSOR = Kind(
    ("What comes after {}?", "Which number follows {}?"),
    min_images=0,
    max_images=0,
    weight=0.1,
    answer=lambda digits: str(digits[0] + 1),
)
_KINDS = (IDENTIFY, PARITY, LARGER, COUNT, READ_ALL, SUCCESSOR)


class DigitsSource:
    """Questions and answers about any number of digit images, none included.

    Evaluation asks each held-out image twice: first which digit it is, then another
    question in which it comes first, with further held-out images where it takes
    several.

    Args:
      config: with the seed, the image format and `max_images_per_sample`.
      tokenizer: of the text.
      split: training or held-out images.
    """

    def __init__(
        self,
        config: config_lib.DataConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        split: config_lib.Split,
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._split = split
        self._images, self._digits = _load(split, config)
        self.image_counts: Sequence[int] = (config.max_images_per_sample,)
        most = config.max_images_per_sample
        self._kinds = [kind for kind in _KINDS if kind.min_images <= most]
        weights = np.asarray([kind.weight for kind in self._kinds])
        self._thresholds = np.cumsum(weights / weights.sum())

    def __len__(self) -> int:
        is_train = self._split is config_lib.Split.TRAIN
        return EPOCH if is_train else 2 * len(self._digits)

    def __getitem__(self, index: int) -> sample_lib.Sample:
        if self._split is config_lib.Split.TRAIN:
            rng = np.random.default_rng((self._config.seed, index))
            choice = np.searchsorted(self._thresholds, rng.random(), side="right")
            kind = self._kinds[min(int(choice), len(self._kinds) - 1)]
            chosen = rng.integers(len(self._digits), size=self._draw_count(kind, rng))
        else:
            rng = np.random.default_rng((_EVAL_SEED, index))
            kind = self._eval_kind(index)
            chosen = rng.integers(len(self._digits), size=self._draw_count(kind, rng))
            chosen[0] = index % len(self._digits)
        phrasing = kind.phrasings[rng.integers(len(kind.phrasings))]
        digits = [int(d) for d in self._digits[chosen]] or [int(rng.integers(10))]
        images = [self._images[i] for i in chosen]
        return self._encode(
            index, phrasing.format(*digits), images, kind.answer(digits)
        )

    def longest_sample(self) -> sample_lib.Sample:
        """Returns a question of the greatest length that any index can have."""
        candidates = []
        for kind in self._kinds:
            most = self._most_images(kind)
            digits = [9] * max(most, 1)
            for phrasing in kind.phrasings:
                images = [self._images[0]] * most
                text = phrasing.format(*digits)
                answers = (kind.answer(digits), kind.answer([8] * len(digits)))
                answer = max(answers, key=len)  # 8: "yes" is longer than "no".
                candidates.append(self._encode(-1, text, images, answer))
        return max(candidates, key=lambda sample: sample.length)

    def _encode(
        self,
        index: int,
        question: str,
        images: Sequence[sample_lib.Array],
        answer: str,
    ) -> sample_lib.Sample:
        placeholders = sample_lib.IMAGE_PLACEHOLDER * len(images)
        return sample_lib.encode_turns(
            [
                sample_lib.Turn(f"{placeholders}{question}\n", is_answer=False),
                sample_lib.Turn(answer, is_answer=True),
            ],
            images,
            self._tokenizer,
            self._config.tokens_per_image,
            sample_id=index,
            origin=f"digits question {question!r}",
        )

    def _eval_kind(self, index: int) -> Kind:
        if index < len(self._digits):
            return IDENTIFY
        others = [k for k in self._kinds if k.min_images > 0 and k is not IDENTIFY]
        return others[index % len(others)]

    def _draw_count(self, kind: Kind, rng: np.random.Generator) -> int:
        most = self._most_images(kind)
        return int(rng.integers(kind.min_images, most + 1))

    def _most_images(self, kind: Kind) -> int:
        limit = self._config.max_images_per_sample
        return limit if kind.max_images is None else kind.max_images


def _load(
    split: config_lib.Split, config: config_lib.DataConfig
) -> tuple[list[sample_lib.Array], sample_lib.Array]:
    """Returns the images, uint8 HWC of the configured size, and their digits."""
    bunch = datasets.load_digits()
    images_NHW = np.rint(bunch.images * (255 / 16)).astype(np.uint8)
    num_train = len(images_NHW) - round(len(images_NHW) * _HELD_OUT_SHARE)
    part = slice(None, num_train)
    if split is config_lib.Split.EVAL:
        part = slice(num_train, None)
    height, width = config.image_size
    scale = (height // config_lib.DIGIT_PIXELS, width // config_lib.DIGIT_PIXELS)
    images_NHW = images_NHW[part].repeat(scale[0], axis=1).repeat(scale[1], axis=2)
    images_NHWC = images_NHW[..., None].repeat(config.channels, axis=-1)
    return list(images_NHWC), bunch.target[part]
