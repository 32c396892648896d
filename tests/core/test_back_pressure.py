"""The limits: exact counts, reserved places, the paper's strict order."""

import dataclasses

import pytest

from rrfp_jax.core import back_pressure, graph, placement
from rrfp_jax.core.back_pressure import (
    BackPressure,
    InFlight,
    OneByOne,
    QueuedWeights,
    RankProgress,
)
from rrfp_jax.errors import ConfigError
from tests.core.instrument import t, ts

ONE_STAGE = graph.chain(4, (0, 1))
TWO_CHUNKS = graph.chain(3, placement.interleaved(2, 2))  # rank 0: stages 0 and 2
SPLIT = graph.chain(4, (0, 1), is_split=True)
SPLIT_CHUNKS = graph.chain(3, placement.interleaved(2, 2), is_split=True)


def in_flight(of, limit):
    """Returns the default rule on rank 0."""
    progress = RankProgress(of, 0)
    return BackPressure(progress, [InFlight(progress, limit)])


def one_by_one(of, limit):
    """Returns the paper's rule on rank 0."""
    progress = RankProgress(of, 0)
    return BackPressure(progress, [OneByOne(progress, limit, of, 0)])


def weights(of, limit):
    """Returns the rule on queued weight gradients on rank 0."""
    progress = RankProgress(of, 0)
    return BackPressure(progress, [QueuedWeights(progress, limit, of)])


def admitted(pressure, launched, wanted):
    """Launches tasks; returns which of the wanted ones are admitted then."""
    for task in ts(launched):
        pressure.launched(task)
    return " ".join(str(task) for task in ts(wanted) if pressure.admits(task))


@pytest.mark.parametrize("rule", [in_flight, one_by_one])
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(rule, limit):
    """C22: with 0 no microbatch could ever start."""
    message = f"pipeline.in_flight_limit={limit} lets no microbatch start"
    with pytest.raises(ConfigError, match=message):
        rule(ONE_STAGE, limit)


def test_in_flight_admits_all_while_two_slots_are_free():
    assert admitted(in_flight(ONE_STAGE, 3), "0F2", "0F0 0F1 0F3") == "0F0 0F1 0F3"


def test_in_flight_keeps_the_last_slot_for_the_lowest():
    """Microbatch 0 has not begun, so nothing else may take the last slot."""
    pressure = in_flight(ONE_STAGE, 2)
    assert admitted(pressure, "0F2", "0F0 0F1 0F3 0B2") == "0F0 0B2"
    assert admitted(pressure, "0F0", "0F1 0F3 0B0 0B2") == "0B0 0B2"
    assert pressure.progress.num_in_flight == 2


def test_in_flight_gives_the_last_slot_away_once_the_lowest_has_begun():
    pressure = in_flight(ONE_STAGE, 2)
    assert admitted(pressure, "0F0", "0F1 0F2 0F3") == "0F1 0F2 0F3"
    assert admitted(pressure, "0F3", "0F1 0F2") == ""
    # The lowest moved on to 1, which has not begun.
    assert admitted(pressure, "0B0", "0F1 0F2") == "0F1"
    assert pressure.progress.num_in_flight == 1


def test_in_flight_frees_a_slot_at_the_last_task_of_a_microbatch_only():
    """Rank 0 has two chunks: four tasks a microbatch."""
    pressure = in_flight(TWO_CHUNKS, 1)
    for task, count in [("0F0", 1), ("2F0", 1), ("2B0", 1), ("0B0", 0)]:
        pressure.launched(t(task))
        assert pressure.progress.num_in_flight == count
    assert admitted(pressure, "", "0F1 0F2") == "0F1"


def test_a_microbatch_is_in_flight_until_its_last_weight_gradient():
    """Its residuals are live until then, so its slot is taken."""
    pressure = in_flight(SPLIT, 1)
    assert admitted(pressure, "0F0 0B0", "0F1 0W0") == "0W0"
    assert pressure.progress.lowest == 1  # 0 needs nothing of anyone any more
    assert admitted(pressure, "0W0", "0F1") == "0F1"


def test_in_flight_counts_a_frozen_stage_by_its_forward():
    """No backward here: the microbatch begins and ends with its F."""
    frozen = graph.PipelineGraph(2, 2, ((0, 1),), (0, 1), frozen=frozenset({0}))
    pressure = in_flight(frozen, 1)
    assert admitted(pressure, "0F0", "0F1") == "0F1"
    assert pressure.progress.num_in_flight == 0


def test_in_flight_passes_over_microbatches_that_skip_the_rank():
    """Microbatches 0 and 1 have no task here, so 2 is the lowest."""
    tower = graph.PipelineGraph(
        2, 4, ((0, 1),), (0, 1), skipped=frozenset({(0, 0), (0, 1)})
    )
    assert admitted(in_flight(tower, 1), "", "0F2 0F3") == "0F2"


def test_one_by_one_admits_all_below_the_limit():
    assert admitted(one_by_one(ONE_STAGE, 2), "0F1", "0F0 0F2 0B1") == "0F0 0F2 0B1"


def test_one_by_one_at_the_limit_completes_the_lowest_in_strict_order():
    """RRFP Appendix C: F ascending, B descending, of the lowest microbatch."""
    pressure = one_by_one(TWO_CHUNKS, 2)
    every = "0F0 2F0 2B0 0B0 2F1 2B1 0B1 2F2"
    assert admitted(pressure, "0F1 0F2", every) == "0F0"
    assert admitted(pressure, "0F0", every) == "2F0"
    assert admitted(pressure, "2F0", every) == "2B0"  # 4 pending: overshoot of C = 2
    assert admitted(pressure, "2B0", every) == "0B0"
    assert admitted(pressure, "0B0", every) == "2F1"  # back at 2, the limit
    assert admitted(pressure, "2F1 2B1", every) == "0B1"
    assert admitted(pressure, "0B1", "0F2 2F2 2B2") == "0F2 2F2 2B2"


def test_one_by_one_without_chunks_admits_only_the_lowest_backward():
    assert admitted(one_by_one(ONE_STAGE, 2), "0F0 0F1", "0F2 0B0 0B1") == "0B0"


def test_one_by_one_does_not_count_forwards_without_a_backward():
    frozen = graph.PipelineGraph(2, 3, ((0, 1),), (0, 1), frozen=frozenset({0}))
    assert admitted(one_by_one(frozen, 1), "0F0 0F1", "0F2") == "0F2"


def test_one_by_one_never_withholds_a_weight_gradient():
    """It holds nothing that anyone waits for, and is no part of the strict order."""
    pressure = one_by_one(SPLIT_CHUNKS, 2)
    assert admitted(pressure, "0F0 2F0 2B0 0F1", "2W0 0B0 2F1 0F2") == "2W0 0B0"
    assert admitted(pressure, "0B0", "0W0 2W0 2F1 0F2") == "0W0 2W0 2F1 0F2"


def test_asking_one_by_one_changes_nothing():
    pressure = one_by_one(ONE_STAGE, 1)
    for _ in range(2):
        assert admitted(pressure, "", "0F0 0F1") == "0F0 0F1"
    assert not pressure.progress.begun


def test_queued_weights_withhold_backwards_only():
    pressure = weights(SPLIT, 2)
    assert admitted(pressure, "0F0 0F1 0F2 0B0 0B1", "0F3 0B2 0W0 0W1") == "0F3 0W0 0W1"
    assert admitted(pressure, "0W1", "0B2") == "0B2"


def test_queued_weights_do_not_count_backwards_that_have_none():
    """Stage 1 is frozen but passes a cotangent on: B without W."""
    of = graph.PipelineGraph(
        3, 2, ((0, 1), (1, 2)), (1, 0, 1), frozen=frozenset({1}), is_split=True
    )
    progress = RankProgress(of, 0)
    pressure = BackPressure(progress, [QueuedWeights(progress, 1, of)])
    assert admitted(pressure, "1F0 1F1 1B0", "1B1") == "1B1"


def test_in_order_the_last_place_in_the_queue_is_for_the_lowest():
    """1 and 2 wait for the W of 0, which may come last: its B must find a place."""
    of = dataclasses.replace(SPLIT, in_order=True)
    pressure = weights(of, 2)
    assert admitted(pressure, "0F0 0F1 0F2 0B1", "0B0 0B2") == "0B0"


def test_all_rules_must_admit_and_the_refusing_ones_are_named():
    progress = RankProgress(SPLIT, 0)
    rules = [InFlight(progress, 2), QueuedWeights(progress, 1, SPLIT)]
    pressure = BackPressure(progress, rules)
    assert admitted(pressure, "0F0 0F1 0B0", "0F2 0B1 0W0") == "0W0"
    assert pressure.why_held(t("0F2")) == "limit=2"
    assert pressure.why_held(t("0B1")) == "weight_limit=1"
    assert pressure.why_held(t("0W0")) == "limit=2, weight_limit=1"


def test_check_limit_returns_what_is_legal():
    assert back_pressure.check_limit("in_flight_limit", 1) == 1
