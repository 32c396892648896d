"""Precedence, pruning and placement."""

import pytest
from hypothesis import given, settings

from rrfp_jax.core import graph, placement
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.errors import ConfigError
from tests.core import instrument, strategies
from tests.core.instrument import t, ts

# Vision 0 -> 1, text embedding 2, language 3 -> 4; 1 and 2 join at 3.
TOWERS = ((0, 1), (1, 3), (2, 3), (3, 4))
SKIP_EDGE = ((0, 1), (1, 2), (2, 3), (0, 3))  # C13


def towers(num_microbatches=2, **pruning):
    """Returns the towers, a stage a rank."""
    ranks = placement.one_each(5)
    return PipelineGraph(5, num_microbatches, TOWERS, ranks, **pruning)


def test_forward_needs_its_in_edges_and_backward_its_out_edges():
    of = towers()
    assert set(of.inputs(t("0F1"))) == set()
    assert set(of.inputs(t("3F1"))) == set(ts("1F1 2F1"))
    assert set(of.inputs(t("4B1"))) == set(ts("4F1"))
    assert set(of.inputs(t("1B1"))) == set(ts("1F1 3B1"))
    assert set(of.successors(t("3B0"))) == set(ts("1B0 2B0"))
    assert set(of.successors(t("1F0"))) == set(ts("3F0 1B0"))


def test_a_skip_edge_gives_a_second_activation_and_a_second_cotangent():
    of = PipelineGraph(4, 1, SKIP_EDGE, (0, 1, 2, 3))
    assert set(of.inputs(t("3F0"))) == set(ts("2F0 0F0"))
    assert set(of.inputs(t("0B0"))) == set(ts("0F0 1B0 3B0"))


def test_a_microbatch_without_an_image_has_no_task_in_the_tower():
    """C15 (a): microbatch 1 skips stages 0 and 1; its join waits for text alone."""
    of = towers(skipped=frozenset({(0, 1), (1, 1)}))
    assert of.tasks(0) == ts("0F0 0B0")
    assert of.inputs(t("3F1")) == (t("2F1"),)
    assert of.successors(t("3B1")) == (t("2B1"),)
    assert set(of.inputs(t("3F0"))) == set(ts("1F0 2F0"))
    assert of.initial_tasks(0) == ts("0F0")
    assert of.initial_tasks(2) == ts("2F0 2F1")


def test_no_image_anywhere_leaves_the_tower_without_work():
    """C15 (c): the tower's ranks have nothing to do, and nothing waits for them."""
    gone = frozenset((s, j) for s in (0, 1) for j in (0, 1))
    of = towers(skipped=gone)
    assert [of.num_tasks(rank) for rank in range(5)] == [0, 0, 4, 4, 4]
    assert of.tasks(0) == []


def test_a_frozen_tower_has_no_backward_and_gets_no_cotangent():
    """C15 (b): stage 0 frozen, the projector 1 is trainable."""
    of = towers(1, frozen=frozenset({0}))
    assert of.tasks(0) == ts("0F0")
    assert of.tasks(1) == ts("1F0 1B0")
    assert of.successors(t("1B0")) == ()
    assert of.route(0).cotangents_to(1) == ()
    assert set(of.route(0).cotangents_to(3)) == {1, 2}


def test_a_frozen_stage_below_something_trainable_passes_the_cotangent_on():
    """Stage 3 is frozen, yet 1 and 2 learn through it."""
    of = towers(1, frozen=frozenset({3, 4}))
    assert of.tasks(3) == ts("3F0 3B0")
    assert set(of.successors(t("3B0"))) == set(ts("1B0 2B0"))


def test_what_is_trainable_upstream_depends_on_the_microbatch():
    """Only the tower learns: a microbatch without an image has no backward at all."""
    of = towers(frozen=frozenset({2, 3, 4}), skipped=frozenset({(0, 1), (1, 1)}))
    assert [str(a) for a in of.tasks(3)] == ["3F0", "3B0", "3F1"]
    assert of.tasks(2) == ts("2F0 2F1")


def test_everything_frozen_is_forward_only():
    of = towers(1, frozen=frozenset(range(5)))
    assert of.tasks() == ts("0F0 1F0 2F0 3F0 4F0")


def test_local_order_is_forward_ascending_backward_descending():
    of = graph.chain(2, placement.v_shaped(2))
    assert of.local_order(1, 0) == (ts("0F1 3F1"), ts("3B1 0B1"))
    assert of.tasks(1) == ts("1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")
    assert of.rank_of(t("2B1")) == 1
    assert of.stages_of == ((0, 3), (1, 2))


def test_a_split_backward_has_a_w_wherever_something_is_trained():
    """Stage 0 is frozen; stage 1 is frozen but passes a cotangent on from stage 2."""
    of = PipelineGraph(
        4,
        1,
        ((0, 3), (1, 2), (2, 3)),
        (0, 0, 0, 0),
        frozen=frozenset({0, 2}),
        is_split=True,
    )
    assert of.tasks() == ts("0F0 1F0 2F0 3F0 3B0 3W0 2B0 1B0 1W0")
    assert of.inputs(t("1W0")) == (t("1B0"),)
    assert of.successors(t("1B0")) == (t("1W0"),)
    assert of.successors(t("1W0")) == ()
    assert not of.exists(t("2W0"))


def test_in_order_each_w_has_its_turn():
    """Microbatch 1 skips stage 0, so the turn passes from 0 to 2."""
    of = PipelineGraph(
        2,
        3,
        ((0, 1),),
        (0, 1),
        frozenset({(0, 1)}),
        is_split=True,
        in_order=True,
    )
    assert of.inputs(t("0W0")) == (t("0B0"),)
    assert set(of.inputs(t("0W2"))) == {t("0B2"), t("0W0")}
    assert set(of.inputs(t("1W2"))) == {t("1B2"), t("1W1")}
    assert of.successors(t("0W0")) == (t("0W2"),)
    assert of.successors(t("0B0")) == (t("0W0"),)
    assert of.turns == ({0: None, 2: 0}, {0: None, 1: 0, 2: 1})
    assert [of.next_turn(0, j) for j in (None, 0, 2)] == [0, 2, None]


def test_order_without_a_split_backward_is_refused():
    with pytest.raises(ConfigError, match="only where W is a task of its own"):
        PipelineGraph(1, 1, (), (0,), in_order=True)


def test_placements():
    """One each, round-robin, the V, and a tower on the ranks of another."""
    assert placement.one_each(3) == (0, 1, 2)
    assert placement.interleaved(2, 3) == (0, 1, 0, 1, 0, 1)
    assert placement.v_shaped(3) == (0, 1, 2, 2, 1, 0)
    shared = PipelineGraph(5, 1, TOWERS, (0, 1, 0, 0, 1))
    assert shared.stages_of == ((0, 2, 3), (1, 4))
    assert placement.colocated(2, 3) == (0, 1, 0, 1, 2)
    assert shared.num_ranks == 2
    assert shared.loss_stage == 4


def test_microbatches_that_visit_the_same_stages_share_a_route():
    of = towers(1000, skipped=frozenset((s, 7) for s in (0, 1)))
    assert len({id(of.route(j)) for j in range(1000)}) == 2


@given(strategies.graphs())
@settings(derandomize=True, deadline=None, max_examples=150)
def test_precedence_equals_its_definition(of):
    """Against `instrument.needs`, written from the definition a second time."""
    expected = instrument.needs(of)
    assert {a: set(of.inputs(a)) for a in of.tasks()} == expected
    for a in of.tasks():
        assert set(of.successors(a)) == {b for b in expected if a in expected[b]}
    by_rank = [of.tasks(rank) for rank in range(of.num_ranks)]
    assert sorted(a for tasks in by_rank for a in tasks) == sorted(expected)
    assert [of.num_tasks(r) for r in range(of.num_ranks)] == list(map(len, by_rank))
    for rank in range(of.num_ranks):
        initial = of.initial_tasks(rank)
        assert set(initial) == {a for a in by_rank[rank] if not expected[a]}


@given(strategies.graphs())
@settings(derandomize=True, deadline=None, max_examples=100)
def test_tasks_are_listed_in_a_legal_order(of):
    """All of `tasks()` can run one after another as listed."""
    done = set()
    for a in of.tasks():
        assert done.issuperset(of.inputs(a))
        done.add(a)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_stages": 0}, "a pipeline of 0 stages and 2 microbatches has nothing"),
        ({"num_microbatches": 0}, "5 stages and 0 microbatches has nothing"),
        ({"placement": (0, 1)}, "the placement names 2 stages; the pipeline has 5"),
        ({"placement": (0, 1, 3, 3, 4)}, r"has a rank without a stage"),
        ({"placement": (-1, 0, 0, 0, 0)}, "placement .-1, 0, 0, 0, 0."),
        ({"edges": (*TOWERS, (3, 3))}, "edge 3 -> 3 is not between stages 0 .. 4"),
        ({"edges": (*TOWERS, (3, 2))}, "edge 3 -> 2 is not between"),
        ({"edges": (*TOWERS, (-1, 2))}, "edge -1 -> 2 is not between"),
        ({"edges": (*TOWERS, (3, 5))}, "edge 3 -> 5 is not between"),
        ({"edges": (*TOWERS, (0, 1))}, "edge 0 -> 1 is given twice"),
        ({"edges": TOWERS[:-1]}, "microbatch 0 visits stage 3, whose output nobody"),
        ({"frozen": frozenset({5, -1})}, r"frozen stages \[-1, 5\] do not exist"),
        ({"skipped": frozenset({(4, 0)})}, "microbatch 0 cannot skip stage 4"),
        ({"skipped": frozenset({(9, 0)})}, "microbatch 0 cannot skip stage 9"),
        ({"skipped": frozenset({(0, 2)})}, "microbatch 2 cannot skip stage 0"),
        ({"skipped": frozenset({(0, -1)})}, "microbatch -1 cannot skip stage 0"),
        ({"skipped": frozenset({(1, 1)})}, "microbatch 1 visits stage 0, whose"),
    ],
)
def test_an_impossible_pipeline_is_refused_with_its_values_and_a_remedy(
    changes, message
):
    good = {
        "num_stages": 5,
        "num_microbatches": 2,
        "edges": TOWERS,
        "placement": (0, 1, 2, 3, 4),
    }
    PipelineGraph(**good)
    with pytest.raises(ConfigError, match=message) as caught:
        PipelineGraph(**good | changes)
    assert "\n  " in str(caught.value), "no remedy on a second line"
