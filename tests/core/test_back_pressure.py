"""The in-flight limit: exact counts, the reserved slot, the paper's strict order."""

import pytest

from rrfp_jax.core import back_pressure, graph, placement
from rrfp_jax.core.back_pressure import Lowest, OneByOne, Only, Open, Reserving
from rrfp_jax.errors import ConfigError
from tests.core.instrument import t, ts

ONE_STAGE = graph.chain(4, (0, 1))
TWO_CHUNKS = graph.chain(3, placement.interleaved(2, 2))  # rank 0: stages 0 and 2


def after(pressure, tasks):
    """Launches `tasks` and returns the admission then."""
    for task in ts(tasks):
        pressure.launched(task)
    return pressure.admission()


@pytest.mark.parametrize("rule", [Reserving, OneByOne])
@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_below_one_is_refused(rule, limit):
    """C22: with 0 no microbatch could ever start."""
    message = f"pipeline.in_flight_limit={limit} lets no microbatch start"
    with pytest.raises(ConfigError, match=message):
        rule(ONE_STAGE, 0, limit)


def test_reserving_admits_all_while_two_slots_are_free():
    assert after(Reserving(ONE_STAGE, 0, 3), "0F2") is Open.ALL


def test_reserving_keeps_the_last_slot_for_the_lowest_unfinished():
    """Microbatch 0 has not begun, so nothing else may take the last slot."""
    pressure = Reserving(ONE_STAGE, 0, 2)
    assert after(pressure, "0F2") == Lowest(0)
    assert after(pressure, "0F0") is Open.ADMITTED
    assert pressure.num_in_flight == 2


def test_reserving_gives_the_last_slot_away_once_the_lowest_has_begun():
    pressure = Reserving(ONE_STAGE, 0, 2)
    assert after(pressure, "0F0") is Open.ALL
    assert after(pressure, "0F3") is Open.ADMITTED
    assert after(pressure, "0B0") == Lowest(1)  # the lowest moved on, and has not begun
    assert pressure.num_in_flight == 1


def test_reserving_frees_a_slot_at_the_last_task_of_a_microbatch_only():
    """Rank 0 has two chunks: four tasks a microbatch."""
    pressure = Reserving(TWO_CHUNKS, 0, 1)
    for task, in_flight in [("0F0", 1), ("2F0", 1), ("2B0", 1), ("0B0", 0)]:
        pressure.launched(t(task))
        assert pressure.num_in_flight == in_flight
    assert pressure.admission() == Lowest(1)


def test_reserving_counts_a_frozen_stage_by_its_forward():
    """No backward here: the microbatch begins and ends with its F."""
    frozen = graph.PipelineGraph(2, 2, ((0, 1),), (0, 1), frozen=frozenset({0}))
    pressure = Reserving(frozen, 0, 1)
    assert after(pressure, "0F0") == Lowest(1)
    assert pressure.num_in_flight == 0
    after(pressure, "0F1")
    assert pressure.num_in_flight == 0


def test_reserving_passes_over_microbatches_that_skip_the_rank():
    """Microbatches 0 and 1 have no task here, so 2 is the lowest."""
    tower = graph.PipelineGraph(
        2, 4, ((0, 1),), (0, 1), skipped=frozenset({(0, 0), (0, 1)})
    )
    assert Reserving(tower, 0, 1).admission() == Lowest(2)


def test_has_begun_is_true_from_the_first_launch_on():
    for rule in (Reserving, OneByOne):
        pressure = rule(ONE_STAGE, 0, 4)
        assert not pressure.has_begun(1)
        pressure.launched(t("0F1"))
        assert pressure.has_begun(1)
        assert not pressure.has_begun(0)


def test_one_by_one_admits_all_below_the_limit():
    assert after(OneByOne(ONE_STAGE, 0, 2), "0F1") is Open.ALL


def test_one_by_one_at_the_limit_completes_the_lowest_in_strict_order():
    """RRFP Appendix C: F ascending, B descending, of the lowest microbatch."""
    pressure = OneByOne(TWO_CHUNKS, 0, 2)
    assert after(pressure, "0F1 0F2") == Only(t("0F0"))
    assert after(pressure, "0F0") == Only(t("2F0"))
    assert after(pressure, "2F0") == Only(t("2B0"))  # 4 pending: overshoot of C = 2
    assert after(pressure, "2B0") == Only(t("0B0"))
    assert after(pressure, "0B0") == Only(t("2F1"))  # back at 2, the limit
    assert after(pressure, "2F1 2B1") == Only(t("0B1"))
    assert after(pressure, "0B1") is Open.ALL


def test_one_by_one_without_chunks_admits_only_the_lowest_backward():
    assert after(OneByOne(ONE_STAGE, 0, 2), "0F0 0F1") == Only(t("0B0"))


def test_one_by_one_does_not_count_forwards_without_a_backward():
    frozen = graph.PipelineGraph(2, 3, ((0, 1),), (0, 1), frozen=frozenset({0}))
    assert after(OneByOne(frozen, 0, 1), "0F0 0F1") is Open.ALL


def test_asking_one_by_one_for_admission_changes_nothing():
    pressure = OneByOne(ONE_STAGE, 0, 1)
    assert after(pressure, "0F1") == Only(t("0F0"))
    assert not pressure.has_begun(0)


def test_check_limit_returns_what_is_legal():
    assert back_pressure.check_limit(1) == 1
