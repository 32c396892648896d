"""A run that stops goes on exactly where it was; what is stored knows no stages.

Bitwise comparisons need a fixed order: where readiness decides, microbatches are added
up in the order in which they happen to become ready.
"""

import gc
import json
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.core import policies, trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.trainer import Trainer
from tests.train import tiny

NUM_STEPS = 8
CHANGES = {
    "train.num_steps": NUM_STEPS,
    "train.checkpoint_every": 2,
    "train.keep_checkpoints": 2,
    "train.trace_step": 3,
    "train.num_traced": 2,
    "pipeline.order": "fixed",
    "pipeline.hint": "1f1b",
}
Make = Callable[..., TrainConfig]


class PowerCut(Exception):
    """Ends a run without any leave."""


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Returns a config with some settings changed."""
    texts = tiny.write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")

    def make(**changes: Any) -> TrainConfig:
        named = {name.replace("__", "."): value for name, value in changes.items()}
        held_out = {"data.eval_paths": (str(texts),)}
        return tiny.lm(texts, {**CHANGES, **held_out, **named})

    return make


@pytest.fixture(scope="module")
def whole(make: Make, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Returns the folder of a run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    Trainer(make()).run(folder)
    return folder


def stop(
    config: TrainConfig, folder: pathlib.Path, after: int, error: BaseException
) -> None:
    """Runs until `error` strikes in the step after so many."""
    made = Trainer(config)
    step = made.step

    def struck(state: Any, batch: Any) -> Any:
        if state.step == after:
            raise error
        return step(state, batch)

    made.step = struck
    with pytest.raises(type(error)):
        made.run(folder)


def assert_same_end(folder: pathlib.Path, whole: pathlib.Path) -> None:
    (arrays, meta), (expected, expected_meta) = map(tiny.checkpoint, (folder, whole))
    jax.tree.map(np.testing.assert_array_equal, arrays, expected)
    assert meta == expected_meta


def test_after_a_crash_a_run_repeats_from_its_checkpoint_bitwise(
    make: Make, whole: pathlib.Path, tmp_path: pathlib.Path
):
    stop(make(), tmp_path, 5, PowerCut())
    assert sorted(tiny.losses(tmp_path)) == [1, 2, 3, 4, 5]
    assert tiny.checkpoint(tmp_path)[1]["step"] == 4
    Trainer(make()).run(tmp_path)
    assert tiny.losses(tmp_path) == tiny.losses(whole)
    assert_same_end(tmp_path, whole)


def test_after_an_interrupt_a_run_goes_on_with_the_next_step_bitwise(
    make: Make, whole: pathlib.Path, tmp_path: pathlib.Path
):
    stop(make(), tmp_path, 5, KeyboardInterrupt())
    assert tiny.checkpoint(tmp_path)[1]["step"] == 5
    before = (tmp_path / "metrics.jsonl").read_text()
    scores = Trainer(make()).run(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text().startswith(before)
    assert tiny.losses(tmp_path) == tiny.losses(whole)
    assert_same_end(tmp_path, whole)
    assert {"eval_loss", "eval_accuracy", "eval_exact_match"} < scores.keys()


def test_a_signal_during_an_update_waits_for_all_stages_and_loses_no_line(
    make: Make, whole: pathlib.Path, tmp_path: pathlib.Path
):
    made = Trainer(make())
    update = made._optimizer.update

    def interrupted(params: Any, state: Any, grads: Any, norm: float) -> Any:
        if int(state[0]["language/embed"][0].count) == 4:  # the fifth step
            signal.raise_signal(signal.SIGINT)
        return update(params, state, grads, norm)

    made._optimizer.update = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path)
    assert tiny.checkpoint(tmp_path)[1]["step"] == 5
    Trainer(make()).run(tmp_path)
    assert_same_end(tmp_path, whole)
    assert tiny.losses(tmp_path) == tiny.losses(whole)


def test_a_signal_that_python_swallows_still_ends_the_run(
    make: Make, tmp_path: pathlib.Path
):
    """Exceptions of callbacks of the garbage collector are dropped; JAX has one."""
    made = Trainer(make())
    step = made.step
    due = []

    def callback(phase: str, info: Any) -> None:
        if due:
            due.pop()
            signal.raise_signal(signal.SIGINT)

    def collecting(state: Any, batch: Any) -> Any:
        if state.step == 4:
            due.append(True)
            gc.collect()
        return step(state, batch)

    made.step = collecting
    gc.callbacks.append(callback)
    try:
        with pytest.raises(KeyboardInterrupt):
            made.run(tmp_path)
    finally:
        gc.callbacks.remove(callback)
    assert tiny.checkpoint(tmp_path)[1]["step"] in (4, 5)


def test_a_run_stopped_in_its_last_evaluation_evaluates_when_it_is_run_again(
    make: Make, whole: pathlib.Path, tmp_path: pathlib.Path
):
    made = Trainer(make())

    def interrupted(params: Any) -> None:
        raise KeyboardInterrupt

    made.evaluate = interrupted
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path)
    assert tiny.checkpoint(tmp_path)[1]["step"] == NUM_STEPS
    scores = Trainer(make()).run(tmp_path)
    assert "eval_loss" in scores
    assert_same_end(tmp_path, whole)


def test_hint_and_order_may_change_in_mid_run(
    make: Make, whole: pathlib.Path, tmp_path: pathlib.Path
):
    stop(make(), tmp_path, 4, KeyboardInterrupt())
    config = make(
        pipeline__hint="b_priority",
        pipeline__order="readiness",
        pipeline__launch_ahead=1,
        train__keep_checkpoints=1,
    )
    Trainer(config).run(tmp_path)
    found, expected = tiny.losses(tmp_path), tiny.losses(whole)
    assert found == pytest.approx(expected, rel=1e-5)  # other orders of summation
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["pipeline"]["hint"] == "b_priority"


def test_the_folder_of_another_run_is_refused_and_left_alone(
    make: Make, whole: pathlib.Path
):
    before = {p: p.stat().st_mtime_ns for p in whole.rglob("*")}
    other = make(model__language__width=32, optimizer__b1=0.8, pipeline__hint="fb")
    with pytest.raises(ConfigError) as refused:
        Trainer(other).run(whole)
    message = str(refused.value)
    assert "2 settings differ" in message
    assert "model.language.width: 16 there, 32 now" in message
    assert "optimizer.b1: 0.9 there, 0.8 now" in message
    assert "hint" not in message
    assert "--workdir" in message
    assert {p: p.stat().st_mtime_ns for p in whole.rglob("*")} == before


def test_a_folder_that_is_a_file_is_refused(make: Make, tmp_path: pathlib.Path):
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="--workdir"):
        Trainer(make()).run(path)
    assert path.read_text() == "mine"


def test_parameters_and_moments_are_stored_under_the_names_of_the_layers(
    whole: pathlib.Path,
):
    arrays, meta = tiny.checkpoint(whole)
    names = {"embed", "block_00", "block_01", "head"}
    assert set(arrays) == {"params", "optimizer"}
    for tree in arrays.values():
        assert set(tree) == {f"language/{name}" for name in names}
    assert meta["step"] == NUM_STEPS


def test_only_the_newest_checkpoints_are_kept(whole: pathlib.Path):
    kept = {path.name for path in (whole / "checkpoints").iterdir()}
    assert {name for name in kept if name.isdigit()} == {"6", "8"}


def test_a_run_leaves_its_config_a_timeline_and_the_traces_it_was_asked_for(
    make: Make, whole: pathlib.Path
):
    settings = json.loads((whole / "config.json").read_text())
    assert settings["train"]["num_steps"] == NUM_STEPS
    assert settings["pipeline"]["hint"] == "1f1b"
    traces = whole / "traces"
    assert {path.name for path in traces.iterdir()} == {
        *(f"step_000003.{ending}" for ending in ("html", "png", "perfetto.json")),
        *(f"step_00000{step}.trace.json" for step in (3, 4)),
    }
    assert (traces / "step_000003.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((traces / "step_000003.perfetto.json").read_text())
    found = trace.from_json((traces / "step_000003.trace.json").read_text())
    fresh = policies.dispatchers(found.graph, make().pipeline.policy)
    assert trace.replay(found, fresh) == found.launches()
    assert len(found.spans) == 4 * 4 * 2


def test_every_line_has_the_figures_of_its_step(whole: pathlib.Path):
    for line in tiny.lines(whole):
        assert line["is_finite"] == 1
        assert 1 <= line["peak_in_flight"] <= 4
        assert 0 <= line["bubble"] < 1
        assert line["grad_norm"] > 0
        assert line["step_time_s"] > 0
        assert line["tokens_per_s"] > 0
