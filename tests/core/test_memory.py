"""Residual bytes: the account, the banker's rule, the smallest limit."""

import dataclasses

import pytest

from rrfp_jax.core import graph, memory, placement, policies
from rrfp_jax.core.back_pressure import BackPressure, RankProgress
from rrfp_jax.core.memory import GIB, ResidualBytes, Residuals
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs, simulator
from tests.core.instrument import t, ts

SPLIT = graph.chain(4, (0, 1), is_split=True)
CHUNKS = graph.chain(4, placement.v_shaped(1), is_split=True)  # stages 0, 1 on rank 0
UNIT = memory.constant(SPLIT, 10, 0.8)


def pressure(of, residuals, limit):
    """Returns the rule on rank 0."""
    progress = RankProgress(of, 0)
    return BackPressure(progress, [ResidualBytes(progress, limit, of, 0, residuals)])


def admitted(rule, launched, wanted):
    """Launches tasks; returns which of the wanted ones are admitted then."""
    for task in ts(launched):
        assert rule.admits(task), f"{task} is not admitted"
        rule.launched(task)
    return " ".join(str(task) for task in ts(wanted) if rule.admits(task))


def of_sizes(of, forward, backward):
    """Returns residuals by microbatch, the same for all stages."""
    stages = range(of.num_stages)
    return Residuals(
        {(Kind.F, s): tuple(forward) for s in stages}
        | {(Kind.B, s): tuple(backward) for s in stages}
    )


def test_each_task_takes_what_it_keeps_and_gives_back_what_it_used():
    assert [UNIT.added(t(text)) for text in ("0F0", "0B0", "0W0")] == [10, -2, -8]
    assert UNIT.most(0, 3) == 10


def test_a_whole_backward_and_a_frozen_stage_keep_nothing():
    whole = memory.constant(graph.chain(1, (0,)), 10)
    assert whole.added(t("0B0")) == -10
    of = graph.PipelineGraph(2, 1, ((0, 1),), (0, 1), frozen=frozenset({0}))
    assert memory.constant(of, 10).added(t("0F0")) == 0


def test_forwards_are_admitted_while_they_fit():
    rule = pressure(SPLIT, UNIT, 30)
    assert admitted(rule, "0F0 0F1", "0F2 0F3") == "0F2 0F3"
    assert admitted(rule, "0F2", "0F3 0B0") == "0B0"
    assert admitted(rule, "0B0", "0F3 0W0") == "0W0"  # 28 held: W is still to run
    assert admitted(rule, "0W0", "0F3") == "0F3"


def test_room_is_kept_for_the_lowest_that_has_not_begun():
    rule = pressure(SPLIT, UNIT, 20)
    assert admitted(rule, "0F2", "0F0 0F1 0F3") == "0F0"


def test_what_a_microbatch_needs_for_its_later_chunks_is_kept_for_the_lowest_only():
    """Two chunks of 10 a microbatch, 50 in all: four may begin, not five.

    Reserving the second chunk for each would let only two begin.
    """
    rule = pressure(CHUNKS, memory.constant(CHUNKS, 10), 50)
    assert admitted(rule, "0F0 0F1 0F2 0F3", "1F0 1F1 1F2 1F3") == "1F0"
    assert admitted(rule, "1F0 1B0 0B0 1W0 0W0", "1F1 1F2 1F3") == "1F1 1F2 1F3"


def test_a_large_microbatch_finds_room_when_its_turn_comes():
    """1 needs 9; admitting 2 and 3 (4 each) beside it would leave no room."""
    sizes = of_sizes(SPLIT, [2, 9, 4, 4], [0, 0, 0, 0])
    rule = pressure(SPLIT, sizes, 10)
    assert admitted(rule, "0F0", "0F1 0F2 0F3") == ""
    assert admitted(rule, "0B0 0W0", "0F1 0F2 0F3") == "0F1"


def test_a_backward_that_keeps_more_than_its_forward_must_fit_too():
    sizes = of_sizes(SPLIT, [4] * 4, [6] * 4)
    rule = pressure(SPLIT, sizes, 12)
    assert admitted(rule, "0F0 0F1", "0F2 0B0 0B1") == "0B0 0B1"
    assert admitted(rule, "0B1", "0F2 0B0 0W1") == "0B0 0W1"
    assert admitted(rule, "0B0", "0F2 0W0 0W1") == "0W0 0W1"


def test_the_smallest_limit_holds_the_largest_microbatch_of_any_rank():
    sizes = of_sizes(CHUNKS, [2, 5, 2, 2], [3, 1, 1, 1])
    assert memory.smallest_limit(CHUNKS, sizes) == (10, 0)
    memory.check_limit(CHUNKS, sizes, 10)
    with pytest.raises(ConfigError) as caught:
        memory.check_limit(CHUNKS, sizes, 9)
    assert "pipeline.memory_limit_gb=" in str(caught.value)
    assert "rank 0" in str(caught.value)


@pytest.mark.parametrize("num_bytes", [1, 7, 12345678, GIB, GIB + 1, 10**13 + 7])
def test_the_smallest_limit_that_is_named_is_enough(num_bytes):
    of = graph.chain(1, (0,))
    sizes = memory.constant(of, num_bytes)
    with pytest.raises(ConfigError) as caught:
        memory.check_limit(of, sizes, num_bytes - 1)
    named = str(caught.value).split("memory_limit_gb to ")[1].split(" or more")[0]
    memory.check_limit(
        of, sizes, Policy(memory_limit_gb=float(named)).memory_limit_bytes
    )


def test_a_limit_in_bytes_needs_to_know_the_bytes():
    with pytest.raises(ConfigError, match="needs to know what tasks keep"):
        policies.dispatchers(SPLIT, Policy("bfw", memory_limit_gb=1.0))


def test_a_fixed_order_above_the_limit_is_refused_with_its_peak():
    of = graph.chain(8, (0, 1, 2, 3))
    sizes = memory.constant(of, GIB)
    table = costs.constant(of, 1.0, 2.0)
    policy = Policy("1f1b", "fixed", memory_limit_gb=3.5)
    with pytest.raises(ConfigError) as caught:
        simulator.simulate(of, policy, table, residuals=sizes)
    text = str(caught.value)
    assert "fixed order 1f1b keeps 4 GiB of residuals on rank 0" in text
    assert "--config.pipeline.memory_limit_gb to 4 or more" in text
    policy = dataclasses.replace(policy, memory_limit_gb=4.0)
    trace = simulator.simulate(of, policy, table, residuals=sizes)
    assert trace.peak_bytes() == [4 * GIB, 3 * GIB, 2 * GIB, GIB]


def test_more_memory_is_used_where_it_is_given():
    of = graph.chain(32, (0, 1, 2, 3))
    sizes = memory.constant(of, GIB)
    table = costs.constant(of, [1.0, 1.0, 1.0, 9.0], 1.0)
    for limit in (1, 2, 5, 9):
        policy = Policy("bfw", in_flight_limit=99, memory_limit_gb=limit)
        trace = simulator.simulate(of, policy, table, residuals=sizes)
        assert trace.peak_bytes()[0] == limit * GIB
