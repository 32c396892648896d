from typing import Any

import pytest

from rrfp_jax import errors
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import dataset


def _text(arrays: dict[str, Any], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.tolist()) for row in arrays["tokens_BL"]]


def test_digits_train_and_evaluate_within_the_declared_buckets(digits_config):
    data = dataset.open_data(digits_config(), 4)
    with data.train as train:
        batches = [next(train) for _ in range(12)]
    batches += list(data.evaluation())
    ids = [i for b in batches[12:] for part in b for i in part.sample_ids]
    assert ids[:718] == list(range(718))
    assert set(ids[718:]) == {-1}
    for batch in batches:
        assert len(batch) == 4
        for part in batch:
            assert part.bucket in data.buckets
            assert part.arrays["tokens_BL"].shape == (2, part.bucket.length)
            assert (part.arrays["tokens_BL"] < data.tokenizer.vocab_size).all()
            if part.bucket.num_images:
                on_image = part.arrays["image_index_BL"] >= 0
                assert not part.arrays["mask_BL"][on_image].any()


def test_evaluation_starts_afresh_each_time(digits_config):
    data = dataset.open_data(digits_config(), 1)
    data.train.close()
    first, second = (next(data.evaluation())[0] for _ in range(2))
    assert first.sample_ids == second.sample_ids == tuple(range(8))


def test_jsonl_is_packed_and_served(text_config, write_jsonl):
    config = text_config(
        paths=(write_jsonl("hello", "world, wide"),),
        eval_paths=(write_jsonl("held out", name="eval.jsonl"),),
    )
    data = dataset.open_data(config, 4)
    with data.train as train:
        batch = next(train)
    assert [bucket.length for bucket in data.buckets] == [8]
    texts = [text for part in batch for text in _text(part.arrays, data.tokenizer)]
    assert set(texts) == {"hellowo", "rld, wid", "e"}
    held_out = list(data.evaluation())
    assert _text(held_out[0][0].arrays, data.tokenizer) == ["held out"]


def test_stdlib_needs_no_files_of_the_user(text_config, tmp_path, monkeypatch):
    for i in range(40):
        (tmp_path / f"module{i}.py").write_text(f"variable = {i}\n")
    paths = {"stdlib": str(tmp_path)}
    monkeypatch.setattr("sysconfig.get_paths", lambda: paths)
    data = dataset.open_data(text_config(source="stdlib"), 2)
    data.train.close()
    text = _text(next(data.evaluation())[0].arrays, data.tokenizer)
    assert "variable" in text[0]


def test_llava_data_is_served_with_its_images(llava_config):
    turns = [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "A."}]
    config = llava_config([{"image": "a.png", "conversations": turns}])
    data = dataset.open_data(config, 1)
    with data.train as train:
        (part,) = next(train)
    assert part.bucket == data.buckets[1]
    assert part.arrays["images_NHWC"].shape == (8, 8, 8, 3)
    assert part.arrays["images_NHWC"][:2].any(axis=(1, 2, 3)).all()
    assert not part.arrays["images_NHWC"][2:].any()


def test_without_eval_paths_evaluation_says_what_to_set(text_config, write_jsonl):
    data = dataset.open_data(text_config(paths=(write_jsonl("hello"),)), 2)
    data.train.close()
    assert data.held_out is None
    with pytest.raises(errors.ConfigError, match=r"--config\.data\.eval_paths"):
        data.evaluation()


def _long_llava(llava_config, **fields: Any) -> config_lib.DataConfig:
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a" * 200}]
    return llava_config([{"conversations": turns}], **fields)


def test_bad_samples_are_found_when_opening_unless_switched_off(llava_config):
    with pytest.raises(errors.ConfigError, match=r"record 1: .* 219 positions"):
        dataset.open_data(_long_llava(llava_config), 1)
    data = dataset.open_data(_long_llava(llava_config, validate=False), 1)
    with data.train, pytest.raises(errors.ConfigError, match="219 positions"):
        next(data.train)


def test_bad_evaluation_samples_are_found_when_opening(llava_config, tmp_path):
    turns = [{"from": "human", "value": "?"}, {"from": "gpt", "value": "a"}]
    bad = _long_llava(llava_config, name="eval.json").paths
    config = llava_config([{"conversations": turns}], eval_paths=bad)
    with pytest.raises(errors.ConfigError, match=r"eval\.json, record 1: .* 219"):
        dataset.open_data(config, 1)


@pytest.mark.parametrize(
    ("fields", "num_microbatches", "parts"),
    [
        ({}, 3, ["num_microbatches=3", "batch_size=8", "to 2 or 4."]),
        (
            {"image_buckets": (0, 8)},
            1,
            ["8 rows may hold 16 images", "Add 16 to --config.data.image_buckets"],
        ),
        (
            {"length_buckets": (16,)},
            4,
            ["digits question", "is 16", "--config.data.length_buckets"],
        ),
        ({"tokenizer": "/none"}, 4, ["'/none'", "--config.data.tokenizer"]),
    ],
)
def test_faults_are_found_when_opening(
    digits_config, fields: dict[str, Any], num_microbatches: int, parts: list[str]
):
    with pytest.raises(errors.ConfigError) as caught:
        dataset.open_data(digits_config(**fields), num_microbatches)
    for part in parts:
        assert part in str(caught.value)
