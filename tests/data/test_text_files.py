import pathlib

import pytest

from rrfp_jax import errors
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import text_files

TRAIN, EVAL = config_lib.Split.TRAIN, config_lib.Split.EVAL


def _write_library(root: pathlib.Path) -> None:
    for i in range(40):
        (root / f"module{i}.py").write_text(f"x = {i}\n")
    for folder in ("site-packages/numpy", "test", "unittest/test", "idlelib"):
        (root / folder).mkdir(parents=True)
        (root / folder / "skipped.py").write_text("skipped")
    (root / "data.txt").write_text("skipped")


def test_stdlib_files_are_held_out_by_name_and_none_is_lost(tmp_path):
    _write_library(tmp_path)
    train = list(text_files.stdlib_documents(TRAIN, tmp_path))
    held_out = list(text_files.stdlib_documents(EVAL, tmp_path))
    assert not set(train) & set(held_out)
    assert set(train) | set(held_out) == {f"x = {i}\n".encode() for i in range(40)}
    assert 0 < len(held_out) < 10


def test_a_file_stays_in_its_split_when_others_come(tmp_path):
    _write_library(tmp_path)
    before = set(text_files.stdlib_documents(EVAL, tmp_path))
    for i in range(40, 60):
        (tmp_path / f"module{i}.py").write_text(f"x = {i}\n")
    assert before <= set(text_files.stdlib_documents(EVAL, tmp_path))


def test_stdlib_files_come_in_the_order_of_their_paths(tmp_path):
    _write_library(tmp_path)
    texts = list(text_files.stdlib_documents(TRAIN, tmp_path))
    order = sorted(texts, key=lambda text: f"module{int(text[4:])}.py")
    assert texts == order


def test_the_running_python_has_its_library():
    first = next(text_files.stdlib_documents(TRAIN))
    assert b"import" in first


def test_a_python_without_sources_is_reported(tmp_path):
    with pytest.raises(errors.ConfigError) as caught:
        list(text_files.stdlib_documents(TRAIN, tmp_path))
    assert str(tmp_path) in str(caught.value)
    assert "--config.data.source" in str(caught.value)


def test_globs_are_read_in_order_and_blank_lines_skipped(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "3"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n\n{"text": "2", "url": 0}')
    patterns = (str(tmp_path / "*.jsonl"),)
    assert list(text_files.jsonl_documents(patterns, "paths", False)) == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": ', "is not JSON"),
        ('{"txt": "a"}', "it has ['txt']"),
        ('{"text": 3}', 'no string under "text"'),
        ('["a"]', "it has list"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, line: str, reason: str):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n\n' + line + "\n")
    with pytest.raises(errors.ConfigError) as caught:
        list(text_files.jsonl_documents((str(path),), "eval_paths", False))
    for part in (f"{path}:3 ", reason, "--config.data.eval_paths"):
        assert part in str(caught.value)


@pytest.mark.parametrize("pattern", ["none.jsonl", "*.none", "."])
def test_a_pattern_that_matches_no_file_is_refused(tmp_path, pattern: str):
    with pytest.raises(errors.ConfigError) as caught:
        text_files.expand_paths((str(tmp_path / pattern),), "paths")
    assert pattern in str(caught.value)
    assert "--config.data.paths" in str(caught.value)
