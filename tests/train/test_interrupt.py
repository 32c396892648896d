"""Ctrl-C on the real command: it ends soon, and the next start goes on from there.

The five seconds are the only wall clock that a test of this project asserts.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.train import tiny

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_S = 5.0
PATIENCE_S = 240.0  # until the run is where the signal is due
FIXED = ("pipeline.order=fixed", "pipeline.hint=1f1b")  # the same bits every time


def start(
    folder: pathlib.Path, texts: pathlib.Path, *changes: str
) -> subprocess.Popen[bytes]:
    settings = (
        "data.source=jsonl",
        f"data.paths=('{texts}',)",
        "optimizer.warmup_steps=2",
        "train.trace_step=0",
        *changes,
    )
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "rrfp_jax.main",
            "--config=configs/lm.py:small",
            f"--workdir={folder}",
            *(f"--config.{setting}" for setting in settings),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=(folder.parent / f"{folder.name}.log").open("ab"),
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert process.poll() is None, "the run ended by itself"
        assert time.monotonic() < give_up_s, "the run does not get there"
        time.sleep(0.01)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Sends Ctrl-C, and asserts status and time."""
    began_s = time.monotonic()
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    finally:
        process.kill()
    assert time.monotonic() - began_s < LIMIT_S
    assert process.returncode == 130


def steps(folder: pathlib.Path) -> list[int]:
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [line["step"] for line in map(json.loads, whole) if "loss" in line]


def finish(process: subprocess.Popen[bytes]) -> str:
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    return output.decode()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("texts")
    return tiny.write_texts(folder / "texts.jsonl", count=300)


@pytest.mark.timeout(600)
def test_ctrl_c_ends_a_run_which_then_continues_bitwise(
    tmp_path: pathlib.Path, texts: pathlib.Path
):
    changes = (*FIXED, "train.num_steps=150", "train.checkpoint_every=10000")
    folder = tmp_path / "run"
    running = start(folder, texts, *changes)
    wait_until(lambda: len(steps(folder)) >= 5, running)
    interrupt(running)
    saved = tiny.checkpoint(folder)[1]["step"]
    assert steps(folder) == list(range(1, saved + 1)), "each saved step has its line"
    assert saved < 150
    log = (tmp_path / "run.log").read_text()
    assert "Traceback" not in log
    before = (folder / "metrics.jsonl").read_text()
    finish(start(folder, texts, *changes))
    after = (folder / "metrics.jsonl").read_text()
    assert after.startswith(before)
    assert json.loads(after[len(before) :].splitlines()[0])["step"] == saved + 1
    finish(start(tmp_path / "whole", texts, *changes))
    assert tiny.losses(folder) == tiny.losses(tmp_path / "whole")


@pytest.mark.timeout(600)
def test_ctrl_c_ends_an_evaluation_which_the_next_start_makes_up(
    tmp_path: pathlib.Path, texts: pathlib.Path
):
    many = tiny.write_texts(tmp_path / "many.jsonl", count=60_000, seed=1)
    folder = tmp_path / "run"
    changes = ("train.num_steps=3", f"data.eval_paths=('{many}',)")
    running = start(folder, texts, *changes)
    wait_until(lambda: 3 in steps(folder), running)
    interrupt(running)
    assert "eval_loss" not in (folder / "metrics.jsonl").read_text()
    assert tiny.checkpoint(folder)[1]["step"] == 3


@pytest.mark.timeout(600)
def test_ctrl_c_ends_compiling(tmp_path: pathlib.Path, texts: pathlib.Path):
    """The stages are so deep that each takes XLA much longer than the limit."""
    folder = tmp_path / "run"
    changes = (
        "pipeline.num_ranks=2",
        "model.language.num_layers=32",
        "model.language.width=64",
    )
    running = start(folder, texts, *changes)
    # Programs of more than a second are kept: both stages' parameters are initialised.
    cache = folder / "compilation_cache"
    wait_until(lambda: len([*cache.glob("jit__init*")]) >= 2, running)
    interrupt(running)
    assert steps(folder) == []
