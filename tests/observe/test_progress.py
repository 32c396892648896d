"""A bar on a terminal, whole lines now and then elsewhere."""

import logging

import pytest

from rrfp_jax.observe import progress


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, logger="absl")
    return lambda: [record.getMessage() for record in caplog.records]


def test_a_line_comes_every_so_often_and_at_the_end(lines, capsys):
    clock = Clock()
    with progress.progress(
        10, "train", "step", every_s=5.0, is_terminal=False, clock=clock
    ) as steps:
        for step in range(10):
            clock.now_s += 2.0
            steps.advance({"loss": 3.0 - step / 8, "tokens/s": 51234.5})
    assert lines() == [
        "train: 3/10 step, 2 s/step; loss=2.75, tokens/s=51234",
        "train: 6/10 step, 2 s/step; loss=2.375, tokens/s=51234",
        "train: 9/10 step, 2 s/step; loss=2, tokens/s=51234",
        "train: 10/10 step, 2 s/step; loss=1.875, tokens/s=51234",
    ]
    assert "\r" not in capsys.readouterr().err


def test_the_last_line_is_not_repeated_and_resumed_work_keeps_its_pace(lines):
    clock = Clock()
    with progress.progress(
        8, "train", "step", initial=6, every_s=1.0, is_terminal=False, clock=clock
    ) as steps:
        for _ in range(2):
            clock.now_s += 4.0
            steps.advance()
    assert lines() == ["train: 7/8 step, 4 s/step", "train: 8/8 step, 4 s/step"]


def test_work_that_fails_says_how_far_it_came(lines):
    def fail():
        with progress.progress(
            3, "compile", "program", is_terminal=False, clock=Clock()
        ) as programs:
            programs.advance()
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert lines() == ["compile: 1/3 program, 0 s/program"]


def test_a_terminal_gets_a_bar_with_the_figures(capsys, lines):
    with progress.progress(2, "train", "step", is_terminal=True) as steps:
        steps.advance({"loss": 2.5, "note": "warm"})
        steps.advance()
    shown = capsys.readouterr().err
    assert "train: 100%" in shown
    assert "2/2" in shown
    assert "loss=2.5, note=warm" in shown
    assert lines() == []
