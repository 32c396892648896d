"""C17: dropout depends on seed, step, layer and microbatch, and on nothing else."""

import pathlib
import random
from typing import Any

import numpy as np
import pytest

from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.runtime.emulation import Emulation
from rrfp_jax.sim import costs
from tests.train import tiny

DROPOUT = {"model.language.dropout": 0.5}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tiny.write_texts(tmp_path_factory.mktemp("texts") / "texts.jsonl")


@pytest.fixture(scope="module")
def on_ranks(texts: pathlib.Path) -> Any:
    """Returns trainers of one run on 1, 2 and 4 ranks."""
    made = {
        ranks: tiny.Live(
            tiny.lm(texts, {**DROPOUT, "pipeline.num_ranks": ranks}), is_compiled=False
        )
        for ranks in (1, 2, 4)
    }
    yield made
    for live in made.values():
        live.close()


def delays(seed: int) -> Emulation:
    """Returns random delays of up to a millisecond, for each task and transfer."""
    rng = random.Random(seed)

    def draw(graph: PipelineGraph) -> costs.CostTable:
        even = costs.constant(graph, 0.0, 0.0)
        return costs.CostTable(
            *(
                {key: tuple(rng.uniform(0, 1e-3) for _ in each) for key, each in t}
                for t in (even.compute.items(), even.transfer.items())
            )
        )

    return Emulation(draw)


def test_c17_the_loss_is_the_same_however_the_model_is_cut(on_ranks: Any):
    batches = [on_ranks[1].next_batch() for _ in range(3)]
    for step, batch in enumerate(batches):
        found = [
            on_ranks[ranks].forward_backward(batch, step).losses for ranks in (1, 2, 4)
        ]
        np.testing.assert_allclose(found[1], found[0], rtol=1e-6)
        np.testing.assert_allclose(found[2], found[0], rtol=1e-6)


def test_c17_twenty_arrival_orders_give_one_loss(on_ranks: Any, tmp_path: pathlib.Path):
    live = on_ranks[4]
    batch = live.next_batch()
    expected = live.forward_backward(batch)
    sequences = set()
    try:
        for seed in range(20):
            graph = expected.trace.graph
            live.pipeline.policy = tiny.shuffled_hint(graph, tmp_path, seed)
            live.pipeline.emulation = delays(seed)
            found = live.forward_backward(batch)
            assert found.losses == expected.losses  # bitwise: the programs are the same
            sequences.add(str(found.trace.launches()))
    finally:
        live.pipeline.policy, live.pipeline.emulation = Policy(), None
    assert len(sequences) > 1


def test_masks_differ_by_step_and_by_microbatch(on_ranks: Any):
    live = on_ranks[4]
    batch = live.next_batch()
    twins = [batch[0]] * 4
    first, second = (live.forward_backward(twins, step).losses for step in (0, 1))
    assert len({*first, *second}) == 8


def test_evaluation_drops_nothing(
    tmp_path: pathlib.Path, texts: pathlib.Path, on_ranks: Any
):
    """Compared with a model that has no dropout at all, on the same parameters."""
    changes = {"data.eval_paths": (str(texts),)}
    plain = tiny.Live(tiny.lm(texts, changes), is_compiled=False)
    dropping = tiny.Live(tiny.lm(texts, {**changes, **DROPOUT}), is_compiled=False)
    expected = plain.trainer.evaluate(plain.state.params)
    found = dropping.trainer.evaluate(dropping.state.params)
    assert found == pytest.approx(expected, rel=1e-6)
    assert found == dropping.trainer.evaluate(dropping.state.params)
    for live in (plain, dropping):
        live.close()


@pytest.mark.slow
def test_c17_training_with_dropout_is_the_same_however_the_model_is_cut(
    texts: pathlib.Path,
):
    found = []
    for ranks in (1, 2, 4):
        config = tiny.lm(texts, {**DROPOUT, "pipeline.num_ranks": ranks})
        live = tiny.Live(config)
        found.append([live.step().result.loss for _ in range(8)])
        live.close()
    np.testing.assert_allclose(found[1:], [found[0]] * 2, rtol=1e-5)
