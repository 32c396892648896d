"""Small inputs that several files of these tests share."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rrfp_jax.data import config as config_lib
from rrfp_jax.data import sample as sample_lib

MakeConfig = Callable[..., config_lib.DataConfig]
MakeSample = Callable[..., sample_lib.Sample]


@pytest.fixture
def digits_config() -> MakeConfig:
    """Makes a config for digits; 4 tokens an image, any field may be replaced."""

    def make(**fields: Any) -> config_lib.DataConfig:
        base: dict[str, Any] = {
            "source": "digits",
            "batch_size": 8,
            "length_buckets": (36, 64),
            "image_buckets": (0, 4, 16),
            "image_size": (8, 8),
            "progress": False,
        }
        return config_lib.DataConfig(**(base | fields))

    return make


@pytest.fixture
def text_config() -> MakeConfig:
    """Makes a config for packed text."""

    def make(**fields: Any) -> config_lib.DataConfig:
        base: dict[str, Any] = {
            "source": "jsonl",
            "batch_size": 4,
            "length_buckets": (8,),
            "progress": False,
        }
        return config_lib.DataConfig(**(base | fields))

    return make


@pytest.fixture
def make_sample() -> MakeSample:
    """Makes a sample of a length, with images of 8x8x1 filled with 10, 20, ..."""

    def make(
        sample_id: int, length: int, image_starts: tuple[int, ...] = ()
    ) -> sample_lib.Sample:
        tokens = np.arange(1, length + 2, dtype=np.int32)
        return sample_lib.Sample(
            sample_id=sample_id,
            origin=f"sample {sample_id}",
            tokens_L=tokens[:-1],
            labels_L=tokens[1:],
            mask_L=np.ones(length, np.float32),
            positions_L=np.arange(length, dtype=np.int32),
            segments_L=np.ones(length, np.int32),
            images_HWC=tuple(
                np.full((8, 8, 1), 10 * (i + 1), np.uint8)
                for i in range(len(image_starts))
            ),
            image_starts=image_starts,
        )

    return make


@pytest.fixture
def write_jsonl(tmp_path: pathlib.Path) -> Callable[..., str]:
    """Writes {"text": ...} lines to a file and returns its path."""

    def write(*texts: str, name: str = "text.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        return str(path)

    return write


@pytest.fixture
def llava_config(tmp_path: pathlib.Path) -> MakeConfig:
    """Writes LLaVA records, and images a.png and b.png, and makes their config."""

    def make(records: Any, name: str = "train.json", **fields: Any) -> Any:
        folder = tmp_path / "images"
        folder.mkdir(exist_ok=True)
        rng = np.random.default_rng(0)
        for image_name, shape in (("a.png", (5, 7, 3)), ("b.png", (12, 9))):
            pixels = rng.integers(256, size=shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / image_name)
        path = tmp_path / name
        is_text = isinstance(records, str)
        path.write_text(records if is_text else json.dumps(records))
        base: dict[str, Any] = {
            "source": "llava",
            "batch_size": 2,
            "length_buckets": (64, 128),
            "image_buckets": (0, 8),
            "image_size": (8, 8),
            "channels": 3,
            "paths": (str(path),),
            "image_folder": str(folder),
            "progress": False,
        }
        return config_lib.DataConfig(**(base | fields))

    return make
