import pathlib

import pytest
import tokenizers

from rrfp_jax import errors
from rrfp_jax.data import tokenizer as tokenizer_lib


def _save_words(path: pathlib.Path, *special: str) -> str:
    """Saves a word-level tokenizer that, left alone, would cut to two tokens."""
    words = ("<unk>", "one", "two", "three", *special)
    model = tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, "<unk>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([name for name in special if name != "<hole>"])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))
    return str(path)


def test_bytes_survive_a_round_trip():
    tokenizer = tokenizer_lib.open_tokenizer("bytes")
    text = "naïve 数字 7\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text.encode()) == tokenizer.encode(text)


def test_special_ids_of_bytes_are_no_bytes_and_decode_to_nothing():
    tokenizer = tokenizer_lib.ByteTokenizer()
    special = [tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id]
    assert sorted(special) == [256, 257, 258]
    assert tokenizer.vocab_size == 259
    assert tokenizer.decode([*special, 55]) == "7"


def test_a_tokenizer_file_brings_its_end_and_padding_tokens(tmp_path):
    path = _save_words(tmp_path / "tokenizer.json", "</s>", "<pad>")
    tokenizer = tokenizer_lib.open_tokenizer(path)
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (4, 5, 6)
    assert tokenizer.encode(b"three one") == [3, 1]
    assert tokenizer.decode([2, 4, 5]) == "two"


def test_a_tokenizer_file_neither_truncates_nor_pads(tmp_path):
    path = _save_words(tmp_path / "tokenizer.json", "</s>")
    assert tokenizer_lib.open_tokenizer(path).encode("one two three one") == [
        1,
        2,
        3,
        1,
    ]


def test_the_end_token_pads_where_there_is_no_padding_token(tmp_path):
    path = _save_words(tmp_path / "tokenizer.json", "<|endoftext|>")
    tokenizer = tokenizer_lib.open_tokenizer(path)
    assert tokenizer.pad_id == tokenizer.eos_id == 4


def test_a_tokenizer_that_is_missing_or_no_tokenizer_or_endless_is_refused(tmp_path):
    broken = tmp_path / "broken.json"
    broken.write_text('{"version": 1}')
    endless = _save_words(tmp_path / "endless.json")
    cases = {
        str(tmp_path / "none.json"): "is neither 'bytes' nor a file",
        str(broken): "is not a tokenizer",
        endless: "has no end token",
    }
    for path, reason in cases.items():
        with pytest.raises(errors.ConfigError) as caught:
            tokenizer_lib.open_tokenizer(path)
        for part in (path, reason, "--config.data.tokenizer"):
            assert part in str(caught.value)


def test_a_vocabulary_larger_than_the_models_is_refused():
    tokenizer = tokenizer_lib.ByteTokenizer()
    tokenizer_lib.check_vocabulary(tokenizer, 259)
    with pytest.raises(errors.ConfigError) as caught:
        tokenizer_lib.check_vocabulary(tokenizer, 258)
    for part in ("vocab_size=258", "259", "--config.model.language.vocab_size to 259"):
        assert part in str(caught.value)
