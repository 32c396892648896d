"""What a process says last, and that it leaves; each is one of its own."""

import subprocess
import sys

import pytest

IMPORT = "import os, sys\nfrom rrfp_jax.coordination import last_words\n"


def run(text: str, stderr: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", IMPORT + text]
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60
    )


def test_the_last_words_are_one_line_whatever_was_printed_before():
    done = run(r"print('so far', end=''); last_words.leave('first\n  second', 3)")
    assert (done.returncode, done.stdout) == (3, "so far")
    assert done.stderr == "first second\n"


def test_of_a_long_text_the_last_line_has_both_ends():
    done = run(r"last_words.leave('begin ' + 'x\n' * 1000 + 'end', 1)")
    *_, last = done.stderr.splitlines()
    assert last.startswith("begin x")
    assert last.endswith("x end")
    assert len(last) < 700
    assert done.stderr.startswith("begin x\nx\n")


def test_a_full_disk_keeps_nobody_from_leaving():
    with open("/dev/full", "w") as full:
        assert run("last_words.leave('gone', 3)", full.fileno()).returncode == 3


@pytest.mark.parametrize("words", ["'gone'", "os.abort()"])
def test_an_abort_prints_what_is_found_and_exits(words: str):
    """Also an abort in an abort, while it is looked for."""
    done = run(f"last_words.on_abort(lambda: {words})\nos.abort()")
    assert done.returncode == 1
    assert done.stderr == ("gone\n" if words == "'gone'" else "")
