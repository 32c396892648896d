"""Layers are timed on the machine, and stages are cut by these times."""

import dataclasses
import itertools
import logging
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import pytest

from rrfp_jax.train import profile, setup
from rrfp_jax.train.config import TrainConfig
from tests.train import tiny

MEASURED = {"pipeline.balance": "measured"}
VISION = ("vision/patch_embed", "vision/block_00", "projector")
LANGUAGE = ("language/embed", "language/block_00", "language/head")


class Fake:
    """A timer that knows before it looks, and remembers what it was asked."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds
        self.asked: list[str] = []

    def __call__(self, what: str, run: Callable[[], Any]) -> float:
        jax.block_until_ready(run())
        self.asked.append(what)
        return self.seconds.get(what.split()[0], 1.0)


@pytest.fixture
def texts(tmp_path: pathlib.Path) -> pathlib.Path:
    return tiny.write_texts(tmp_path / "texts.jsonl")


def set_up(config: TrainConfig, timer: Fake) -> setup.Setup:
    made = setup.set_up(config, timer)
    made.data.train.close()
    return made


def names(made: setup.Setup) -> list[list[str]]:
    return [[layer.name for layer in layers] for layers in made.cut.layers]


def asked(names: tuple[str, ...], kinds: str = "FB") -> list[str]:
    return [f"{name} {kind}" for name in names for kind in kinds]


def test_the_cut_follows_the_measured_times():
    by_flops = setup.set_up(tiny.mm())
    by_flops.data.train.close()
    assert names(by_flops)[0] == list(VISION)
    timer = Fake(dict.fromkeys(VISION, 9.0))
    by_times = set_up(tiny.mm(MEASURED), timer)
    assert names(by_times) == [*([name] for name in VISION), list(LANGUAGE)]
    assert timer.asked == asked(VISION + LANGUAGE)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_equal_layers_are_timed_once(texts: pathlib.Path, dropout: float):
    changes = {**MEASURED, "model.language.dropout": dropout}
    timer = Fake({"language/block_00": 5.0})
    made = set_up(
        tiny.lm(texts, {**changes, "model.language.num_layers": 4}),
        timer,
    )
    assert timer.asked == asked(LANGUAGE)
    found = profile.layer_seconds(
        made.model, made.config.model, made.examples(dropout > 0)[0], timer
    )
    blocks = [f"language/block_{i:02d}" for i in range(4)]
    assert found == {
        LANGUAGE[0]: 2.0,
        **dict.fromkeys(blocks, 10.0),
        LANGUAGE[2]: 2.0,
    }


def test_a_trained_layer_is_not_equal_to_a_frozen_one(texts: pathlib.Path):
    timer = Fake({})
    set_up(tiny.lm(texts, {**MEASURED, "model.frozen": ("language/block_00",)}), timer)
    blocks = ("language/block_00", "language/block_01")
    assert timer.asked == asked((LANGUAGE[0], *blocks, LANGUAGE[2]))


@pytest.mark.parametrize(
    ("frozen", "without_backward"),
    [(("vision/patch", "vision/block"), VISION[:2]), (("vision/block",), ())],
)
def test_only_what_is_trained_or_has_something_trained_upstream_has_a_backward(
    frozen: tuple[str, ...], without_backward: tuple[str, ...]
):
    timer = Fake({})
    set_up(tiny.mm({**MEASURED, "model.frozen": frozen}), timer)
    rest = [name for name in VISION + LANGUAGE if name not in without_backward]
    assert timer.asked == asked(without_backward, "F") + asked(tuple(rest))


def test_without_images_the_vision_tower_takes_no_time():
    config = tiny.mm()
    made, timer = set_up(config, Fake({})), Fake({})
    blind = next(e for e in made.examples(False) if "images_NHWC" not in e)
    found = profile.layer_seconds(made.model, config.model, blind, timer)
    assert found == {**dict.fromkeys(VISION, 0.0), **dict.fromkeys(LANGUAGE, 2.0)}
    assert timer.asked == asked(LANGUAGE)


def test_what_is_recomputed_is_not_kept_while_it_is_timed(texts: pathlib.Path):
    made = set_up(tiny.lm(texts, {"pipeline.layer_counts": (1, 1, 1, 1)}), Fake({}))
    kept: dict[str, int] = {}

    def timer(what: str, run: Callable[[], Any]) -> float:
        if what == "language/block_00 F":
            _, extra, _ = run()
            kept[recompute] = sum(x.nbytes for x in extra)
        return 1.0

    for recompute in ("none", "stage"):
        config = dataclasses.replace(made.config.model, recompute=recompute)
        profile.layer_seconds(made.model, config, made.examples(False)[0], timer)
    assert kept["none"] > kept["stage"] == 0


def test_given_counts_leave_nothing_to_measure(caplog: pytest.LogCaptureFixture):
    timer = Fake({})
    counts = {"pipeline.layer_counts": (1, 2, 2, 1)}
    with caplog.at_level(logging.WARNING):
        made = set_up(tiny.mm({**MEASURED, **counts}), timer)
    assert [len(layers) for layers in made.cut.layers] == [1, 2, 2, 1]
    assert not timer.asked
    assert "layer_counts" in caplog.text


def test_the_median_of_calls_counts_without_the_first():
    ticks = iter([0.0, 50.0, 0.0, 50.0, *itertools.chain(*((0.0, t) for t in TIMES))])
    calls: list[int] = []

    def run() -> jax.Array:
        calls.append(1)
        return jax.numpy.zeros(())

    found = profile.median_seconds("it", run, clock=lambda: next(ticks))
    assert found == 5.0
    assert len(calls) == 2 + len(TIMES)
    assert not list(ticks)


TIMES = (3.0, 1.0, 2.0, 9.0, 4.0, 6.0, 8.0, 5.0, 7.0)


@pytest.mark.slow
def test_a_measured_cut_trains_as_any_other():
    losses = []
    for balance in ("flops", "measured"):
        live = tiny.Live(tiny.mm({"pipeline.balance": balance}))
        losses.append([live.step().result.loss for _ in range(2)])
        live.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
