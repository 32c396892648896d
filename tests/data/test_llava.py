import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rrfp_jax import errors
from rrfp_jax.data import llava
from rrfp_jax.data import tokenizer as tokenizer_lib

TOKENIZER = tokenizer_lib.ByteTokenizer()


def _record(question: str, answer: str = "yes", **fields: Any) -> dict[str, Any]:
    return {
        "id": "r1",
        "conversations": [
            {"from": "human", "value": question},
            {"from": "gpt", "value": answer},
        ],
        **fields,
    }


def _open(config: Any, field: str = "paths") -> llava.LlavaSource:
    return llava.LlavaSource(config, TOKENIZER, field)


def _error(config: Any) -> str:
    with pytest.raises(errors.ConfigError) as caught:
        [sample.length for sample in _open(config)]
    return str(caught.value)


def test_a_record_may_have_no_image_one_or_several(llava_config):
    config = llava_config(
        [
            _record("Hi?"),
            _record("<image>\nWhat?", image="a.png"),
            _record("<image> or <image>?", image=["a.png", "b.png"]),
        ]
    )
    source = _open(config)
    assert list(source.image_counts) == [0, 1, 2]
    samples = [source[i] for i in range(3)]
    assert [s.image_starts for s in samples] == [(), (6,), (6, 14)]
    assert [s.sample_id for s in samples] == [0, 1, 2]
    texts = [TOKENIZER.decode(s.tokens_L.tolist()) for s in samples]
    assert texts == [
        "USER: Hi?\nASSISTANT: yes",
        "USER: \nWhat?\nASSISTANT: yes",
        "USER:  or ?\nASSISTANT: yes",
    ]


def test_json_lines_hold_the_same_records_as_an_array(llava_config):
    records = [_record("One?"), _record("<image>Two?", image="a.png")]
    lines = "\n\n".join(map(json.dumps, records))
    array = _open(llava_config(records))
    stream = _open(llava_config(lines, name="train.jsonl"))
    for index in range(2):
        np.testing.assert_array_equal(array[index].tokens_L, stream[index].tokens_L)
        assert array[index].image_starts == stream[index].image_starts


def test_only_the_answers_are_learned(llava_config):
    record = _record("One?", "first")
    record["conversations"] = [
        {"from": "system", "value": "Be brief."},
        *record["conversations"],
        *_record("Two?", "second")["conversations"],
    ]
    sample = _open(llava_config([record]))[0]
    learned = sample.labels_L[sample.mask_L > 0].tolist()
    end = TOKENIZER.eos_id
    assert learned == [*b" first", end, *b" second", end]


def test_images_are_scaled_and_converted(llava_config):
    for channels in (1, 3):
        config = llava_config([_record("<image>", image="b.png")], channels=channels)
        image = _open(config)[0].images_HWC[0]
        assert image.shape == (8, 8, channels)
        assert image.dtype == np.uint8
    with Image.open(f"{config.image_folder}/b.png") as original:
        scaled = original.resize((8, 8), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(image[..., 2], np.asarray(scaled))


def test_height_and_width_are_not_exchanged(llava_config):
    config = llava_config([_record("<image>", image="a.png")], image_size=(4, 8))
    image_HWC = _open(config)[0].images_HWC[0]
    with Image.open(f"{config.image_folder}/a.png") as original:
        wide = original.resize((8, 4), Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(image_HWC, np.asarray(wide))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ("text", "record 2 is a str, not an object"),
        ({"id": 5}, "record 2 (id=5) has no list \"conversations\"; it has ['id']"),
        (_record("") | {"conversations": []}, 'has no list "conversations"'),
        ({"conversations": [{"from": "gpt"}]}, 'turn 1 has no string under "value"'),
        ({"conversations": ["hello"]}, 'turn 1 has no string under "value"'),
        (
            {"conversations": [{"from": "me", "value": ""}]},
            "turn 1 has \"from\": 'me', not human or gpt",
        ),
        (
            {"conversations": [{"from": "human", "value": "?"}]},
            'record 2 does not end with a "gpt" turn',
        ),
        (_record("?", image=7), "(id='r1') has \"image\": 7"),
        (_record("?", image="a.png"), "has 0 <image> placeholders and 1 images"),
        (_record("<image><image>"), "has 2 <image> placeholders and 0 images"),
    ],
)
def test_a_bad_record_is_named(llava_config, record: Any, reason: str):
    config = llava_config([_record("Fine?"), record])
    message = _error(config)
    for part in (config.paths[0], reason, "--config.data.paths"):
        assert part in message


def test_a_missing_image_is_named_with_its_record(llava_config):
    message = _error(llava_config([_record("<image>", image="none.png")]))
    for part in ("none.png does not exist", "(id='r1')", "--config.data.image_folder"):
        assert part in message


@pytest.mark.parametrize("content", [b"not an image", b"", "half"])
def test_a_file_that_is_no_whole_image_is_named(llava_config, content: bytes | str):
    config = llava_config([_record("<image>", image="c.png")])
    if isinstance(content, str):
        with open(f"{config.image_folder}/a.png", "rb") as whole:
            content = whole.read()[:60]
    with open(f"{config.image_folder}/c.png", "wb") as file:
        file.write(content)
    message = _error(config)
    for part in ("c.png is not an image", "(id='r1')", "--config.data.image_folder"):
        assert part in message


def test_a_missing_image_folder_is_refused(llava_config):
    config = llava_config([_record("<image>", image="a.png")], image_folder="/none")
    message = _error(config)
    assert "data.image_folder='/none'" in message
    assert "--config.data.image_folder" in message


def test_text_needs_no_image_folder(llava_config):
    assert len(_open(llava_config([_record("Hi?")], image_folder=""))) == 1


def test_broken_json_is_named_by_line(llava_config):
    message = _error(llava_config('[\n{"id": 1},\n{"id": \n]'))
    assert "is not JSON" in message
    assert "line 4" in message
    lines = json.dumps(_record("Fine?")) + '\n{"id": \n'
    message = _error(llava_config(lines))
    assert "train.json, line 2 is not JSON" in message


@pytest.mark.parametrize("content", ["", "[]", "\n\n"])
def test_a_file_without_records_is_refused(llava_config, content: str):
    message = _error(llava_config(content))
    assert "has no records" in message
    assert "--config.data.paths" in message
