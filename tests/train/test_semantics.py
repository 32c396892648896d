"""Every policy, recompute and mesh trains as one process does on the whole batch."""

import functools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rrfp_jax.train.config import TrainConfig
from tests.train import reference, tiny

Reference = reference.Reference
Train = Callable[..., Reference]

FIXED = {"pipeline.order": "fixed", "pipeline.hint": "1f1b"}
TWO_RANKS = {"pipeline.num_ranks": 2}
# Two pipelines of two microbatches each.
REPLICAS = {"mesh.replicas": 2, "pipeline.num_microbatches": 2, **TWO_RANKS}
ZERO = {"optimizer.shard_state": True}
BFLOAT16 = {"model.language.compute_dtype": "bfloat16"}
V_SHAPED = {"pipeline.placement": "v_shaped", **TWO_RANKS}
INTERLEAVED = {
    "pipeline.placement": "interleaved",
    "pipeline.num_chunks": 2,
    **TWO_RANKS,
}
BFW_MEMORY = {
    "pipeline.hint": "bfw_memory",
    "pipeline.memory_limit_gb": 1e-4,  # of about 8e-5 for one microbatch
    "pipeline.launch_ahead": 1,
}
ALL_BFLOAT16 = {**BFLOAT16, "model.vision.compute_dtype": "bfloat16"}


def name(changes: dict[str, Any]) -> str:
    """Returns `data=2 model=2`, or `bf` for no changes."""
    short = (f"{path.split('.')[-1]}={value}" for path, value in changes.items())
    return " ".join(short) or "bf"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny.write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture(scope="module")
def train_alone() -> Train:
    """Returns the reference of a config; what only the pipeline reads is left out."""

    @functools.cache
    def train(config: TrainConfig) -> Reference:
        return reference.train(config, tiny.NUM_STEPS)

    return train


def check(
    config: TrainConfig, folder: pathlib.Path, expected: Reference, tolerance: float
) -> None:
    found = tiny.run(config, folder)
    assert [line["step"] for line in found] == list(range(1, tiny.NUM_STEPS + 1))
    losses = [line["loss"] for line in found]
    np.testing.assert_allclose(losses, expected.losses, rtol=tolerance)
    norms = [line["grad_norm"] for line in found]
    np.testing.assert_allclose(norms, expected.norms, rtol=100 * tolerance)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FIXED,
        {"model.recompute": "stage", **TWO_RANKS},
        {"model.recompute": "dots", **TWO_RANKS, **FIXED},
        {"mesh.data": 2, "mesh.model": 2, **TWO_RANKS},
        {
            "pipeline.hint": "bfw",
            "model.recompute": "dots",
            "mesh.data": 2,
            **TWO_RANKS,
        },
        {**V_SHAPED, **BFW_MEMORY},
        REPLICAS,
        pytest.param({**REPLICAS, **ZERO, "mesh.data": 2}, marks=pytest.mark.slow),
        pytest.param({**V_SHAPED, "mesh.data": 2}, marks=pytest.mark.slow),
        pytest.param({**INTERLEAVED, **FIXED, "mesh.model": 2}, marks=pytest.mark.slow),
        # A mean of means would differ: microbatches hold different numbers of tokens.
        pytest.param({"pipeline.num_microbatches": 8}, marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_a_text_pipeline_trains_as_one_process_does(
    changes: dict[str, Any],
    tmp_path: pathlib.Path,
    texts: pathlib.Path,
    train_alone: Train,
):
    check(tiny.lm(texts, changes), tmp_path, train_alone(tiny.lm(texts)), 1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        FIXED,
        {
            "pipeline.placement": "colocated",
            "pipeline.hint": "bfw",
            "pipeline.deterministic": True,
            **TWO_RANKS,
        },
        # The tower on ranks of one device, the language model on ranks of two.
        {"mesh.model": 2, "mesh.vision_model": 1},
        {**REPLICAS, **ZERO, "mesh.model": 2},
        pytest.param(
            {"model.recompute": "stage", "mesh.data": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"model.recompute": "dots", "mesh.model": 2, **FIXED},
            marks=pytest.mark.slow,
        ),
    ],
    ids=name,
)
def test_a_multimodal_pipeline_trains_as_one_process_does(
    changes: dict[str, Any], tmp_path: pathlib.Path, train_alone: Train
):
    check(tiny.mm(changes), tmp_path, train_alone(tiny.mm()), 1e-5)


def test_bfloat16_trains_as_bfloat16_does_in_one_process(
    tmp_path: pathlib.Path, texts: pathlib.Path, train_alone: Train
):
    expected = train_alone(tiny.lm(texts, BFLOAT16))
    exact = train_alone(tiny.lm(texts))
    assert expected.losses != exact.losses
    check(tiny.lm(texts, {**BFLOAT16, **TWO_RANKS}), tmp_path, expected, 2e-3)


@pytest.mark.slow
def test_bfloat16_images_train_as_they_do_in_one_process(
    tmp_path: pathlib.Path, train_alone: Train
):
    changes = {**ALL_BFLOAT16, "model.recompute": "dots"}
    check(tiny.mm(changes), tmp_path, train_alone(tiny.mm(ALL_BFLOAT16)), 2e-3)
