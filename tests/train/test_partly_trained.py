"""Frozen layers, stages with nothing to train, and one parameter in two places."""

import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from rrfp_jax.core.task import Kind
from tests.train import reference, tiny

TOWER = ("vision/patch_embed", "vision/block_00")
# patch_embed, block | projector | embed | block, head
FROZEN_TOWER = {
    "model.frozen": ("vision/",),
    "pipeline.layer_counts": (2, 1, 1, 2),
    "pipeline.num_microbatches": 8,  # of one sample: some have no image
    "data.image_buckets": (0, 2),
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny.write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture(scope="module")
def frozen_tower(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns initial parameters, and losses, traces and state after all steps."""
    live = tiny.Live(tiny.mm(FROZEN_TOWER))
    before = live.params()
    figures = [live.step() for _ in range(tiny.NUM_STEPS)]
    yield live, before, figures
    live.close()


def test_c15b_a_frozen_tower_is_bitwise_unchanged_and_has_no_state(frozen_tower: Any):
    live, before, _ = frozen_tower
    after = live.params()
    for name in TOWER:
        jax.tree.map(np.testing.assert_array_equal, after[name], before[name])
    trained = set(after) - set(TOWER)
    assert set(live.optimizer()) == trained
    for name in trained:
        same = jax.tree.map(np.array_equal, after[name], before[name])
        assert not any(jax.tree.leaves(same)), name


def test_c15b_a_frozen_tower_gets_no_backward_and_no_cotangent(frozen_tower: Any):
    _, _, figures = frozen_tower
    visited = set()
    for figure in figures:
        trace = figure.result.trace
        ran = {(span.task.kind, span.task.stage) for span in trace.spans}
        visited |= ran
        assert (Kind.B, 0) not in ran
        sent = {(t.source.kind, t.to) for t in trace.transfers}
        assert (Kind.B, 0) not in sent
    assert {(Kind.F, 0), (Kind.B, 1)} <= visited


def test_c15b_the_projector_trains_as_one_process_trains_it(frozen_tower: Any):
    live, before, figures = frozen_tower
    expected = reference.train(live.config, tiny.NUM_STEPS)
    losses = [figure.result.loss for figure in figures]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    moved = jax.tree.map(np.subtract, live.params()["projector"], before["projector"])
    wanted = jax.tree.map(
        np.subtract, expected.params["projector"], before["projector"]
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-4),
        moved,
        wanted,
    )


def test_c15_a_microbatch_without_images_skips_the_tower(frozen_tower: Any):
    _, _, figures = frozen_tower
    skipped = [figure.result.trace.graph.skipped for figure in figures]
    assert any(skipped)
    assert {stage for each in skipped for stage, _ in each} == {0, 1}


def test_c04_a_stage_with_nothing_to_train_leaves_the_norm_to_the_others(
    tmp_path: pathlib.Path, texts: pathlib.Path
):
    changes = {
        "model.frozen": ("language/embed",),
        "pipeline.layer_counts": (1, 1, 1, 1),
        "optimizer.clip_norm": 0.1,
    }
    config = tiny.lm(texts, changes)
    expected = reference.train(config, tiny.NUM_STEPS)
    assert min(expected.norms) > 0.1, "clipping is on at every step"
    found = tiny.run(config, tmp_path)
    losses = [line["loss"] for line in found]
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    norms = [line["grad_norm"] for line in found]
    np.testing.assert_allclose(norms, expected.norms, rtol=1e-3)


def test_c05_the_copies_of_a_tied_embedding_stay_bitwise_equal(tmp_path: pathlib.Path):
    config = tiny.mm()
    found = tiny.run(config, tmp_path)
    arrays, _ = tiny.checkpoint(tmp_path)
    embed, head = (arrays["params"][f"language/{name}"] for name in ("embed", "head"))
    np.testing.assert_array_equal(embed["embedding"], head["embedding"])
    expected = reference.train(config, tiny.NUM_STEPS)
    np.testing.assert_allclose(
        embed["embedding"], expected.params["language/embed"]["embedding"], atol=2e-4
    )
    norms = [line["grad_norm"] for line in found]
    np.testing.assert_allclose(norms, expected.norms, rtol=1e-3)  # counted once
