"""C10: a step that is not finite changes nothing, and says where it began."""

import dataclasses
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.data.microbatch import Microbatch
from rrfp_jax.train import trainer
from tests.train import tiny


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tiny.Live]:
    texts = tiny.write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")
    found = tiny.Live(tiny.lm(texts, {"optimizer.warmup_steps": 0}))
    found.step()  # moments and counters are not at their first values
    yield found
    found.close()


def poisoned(batch: list[Microbatch], at: int, name: str, value: Any) -> Any:
    """Returns the batch with one array of one microbatch filled with `value`."""
    arrays = dict(batch[at].arrays)
    arrays[name] = np.full_like(arrays[name], value)
    changed = dataclasses.replace(batch[at], arrays=arrays)
    return [changed if j == at else each for j, each in enumerate(batch)]


def assert_same(found: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("name", "value", "task"),
    [
        ("mask_BL", np.inf, "3F2"),  # the loss of the last stage
        ("tokens_BL", 10_000, "0F2"),  # outside the vocabulary: NaN on the first
    ],
)
def test_c10_a_step_that_is_not_finite_changes_nothing_on_any_stage(
    name: str,
    value: Any,
    task: str,
    live: tiny.Live,
    caplog: pytest.LogCaptureFixture,
):
    params, optimizer, step = live.params(), live.optimizer(), live.state.step
    with caplog.at_level(logging.ERROR):
        figures = live.step(poisoned(live.next_batch(), 2, name, value))
    assert not figures.is_finite
    assert_same(live.params(), params)
    assert_same(live.optimizer(), optimizer)
    assert live.state.step == step + 1
    (record,) = [r for r in caplog.records if "not finite" in r.getMessage()]
    assert f"step {step + 1} " in record.getMessage()
    assert f"task {task} " in record.getMessage()


def test_c10_the_next_step_works_as_if_there_had_been_none(live: tiny.Live):
    batch = live.next_batch()
    live.step(poisoned(live.next_batch(), 2, "mask_BL", np.nan))
    counts = live.optimizer()["language/head"][0].count
    expected = live.forward_backward(batch).loss
    figures = live.step(batch)
    assert figures.is_finite
    assert figures.result.loss == expected
    assert live.optimizer()["language/head"][0].count == counts + 1
    assert live.forward_backward(batch).loss < expected


def test_the_logged_rate_is_the_one_that_was_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """A skipped step does not move the schedule of the optimizer."""
    texts = tiny.write_texts(tmp_path / "texts.jsonl")
    made = trainer.Trainer(tiny.lm(texts))
    whole = made.step

    def step(state: trainer.State, batch: list[Microbatch]) -> trainer.Figures:
        bad = poisoned(batch, 2, "mask_BL", np.inf)
        return whole(state, bad if state.step == 1 else batch)

    monkeypatch.setattr(made, "step", step)
    made.run(tmp_path / "run")
    found = tiny.lines(tmp_path / "run")
    assert [line["is_finite"] for line in found[:3]] == [1, 0, 1]
    assert found[1]["loss"] is None
    assert found[2]["learning_rate"] == found[1]["learning_rate"]
