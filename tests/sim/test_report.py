"""Where the time went: each idle second has one cause, and no order beats the bound."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import graph, memory, policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Span, Trace
from rrfp_jax.sim import costs, machine, report, simulator
from rrfp_jax.sim.report import Bubble
from tests.core import strategies
from tests.core.instrument import t

laws = settings(derandomize=True, deadline=None, max_examples=120)
PAIR = graph.chain(1, (0, 1))
FIXED = Policy(hint="1f1b", order="fixed")
MACHINES = {"overlapped": machine.Overlapped, "blocking": machine.Blocking}


def reported(of, policy, table, blocking=False):
    """Simulates and reports."""
    trace = simulator.simulate(of, policy, table, blocking)
    return report.report(trace, blocking)


def test_waiting_for_what_does_not_exist_is_input_and_under_way_is_transfer():
    """F = 1, B = 2, link 4: 0B0 waits 7 s for 1B0 to exist and 4 s for it to travel."""
    found = reported(PAIR, Policy(), costs.constant(PAIR, 1.0, 2.0, 4.0))
    assert found.makespan_s == 14.0
    assert found.busy_s == (3.0, 3.0)
    assert found.bubbles == (
        Bubble(input_s=7.0, transfer_s=4.0),
        Bubble(fill_drain_s=5.0 + 6.0),
    )
    assert found.bubble == Bubble(11.0, 7.0, 4.0, 0.0)
    assert found.bubble.total_s == 22.0
    assert found.bubble_fraction == pytest.approx(22.0 / 28.0)
    assert found.peak_in_flight == (1, 1)


def test_a_fixed_order_holds_ready_work():
    """Text-only 1F2 is ready from the start; the order waits for 1F1, 3 to 11."""
    of = PipelineGraph(2, 3, ((0, 1),), (0, 1), frozenset({(0, 2)}), frozenset({0}))
    table = costs.constant(of, 1.0, 1.0)
    table.compute[Kind.F, 0] = (1.0, 10.0, 0.0)
    assert reported(of, FIXED, table).bubbles[1] == Bubble(fill_drain_s=1.0, held_s=8.0)
    assert reported(of, Policy(), table).bubble.held_s == 0.0


def test_back_pressure_holds_ready_work():
    """limit=1: 0F1 is ready all along and waits, 1 to 13, until 0B0 has begun."""
    of = graph.chain(2, (0, 1))
    table = costs.constant(of, 1.0, 2.0, 4.0)
    found = reported(of, Policy(in_flight_limit=1), table)
    assert found.bubbles[0] == Bubble(input_s=7.0, transfer_s=4.0, held_s=11.0)
    free = reported(of, Policy(), table)
    assert free.bubbles[0].held_s == 0.0


def test_a_weight_gradient_is_work_that_nothing_waits_for():
    """F = 1, B = 2, W = 3, link 4: 1W0 runs while 1B0 travels, and 0W0 comes last."""
    of = dataclasses.replace(PAIR, is_split=True)
    found = reported(of, Policy("bfw"), costs.constant(of, 1.0, 2.0, 4.0, 3.0))
    assert found.makespan_s == 17.0
    assert found.busy_s == (6.0, 6.0)
    assert found.bubbles == (
        Bubble(input_s=7.0, transfer_s=4.0),
        Bubble(fill_drain_s=5.0 + 6.0),
    )


@pytest.mark.parametrize(
    ("in_order", "expected"),
    [(False, Bubble(input_s=2.0, held_s=3.0)), (True, Bubble(input_s=5.0))],
)
def test_a_weight_gradient_is_held_only_once_it_is_its_turn(in_order, expected):
    """0B1 ends at 5 and 0B0 begins at 8; 0W1 could run meanwhile, unless in order."""
    of = graph.chain(2, (0, 1), is_split=True)
    ran = Trace(dataclasses.replace(of, in_order=in_order))
    here = [("0F0", 0), ("0F1", 1), ("0B1", 4), ("0B0", 8), ("0W0", 9), ("0W1", 10)]
    there = [("1F1", 2), ("1B1", 3), ("1F0", 6), ("1B0", 7), ("1W0", 8), ("1W1", 9)]
    for rank, launched in enumerate([here, there]):
        ran.spans += [Span(t(name), rank, s, s + 1.0) for name, s in launched]
    assert report.report(ran).bubbles[0] == expected


def test_peak_bytes_are_those_of_the_trace_and_zero_where_not_known():
    """Rank 0 has both Fs begun; rank 1 one F, after a B that keeps half."""
    of = graph.chain(2, (0, 1), is_split=True)
    table = costs.constant(of, 1.0, 1.0, weight_s=1.0)
    kept = memory.constant(of, 10, 0.5)
    ran = simulator.simulate(of, Policy("bfw"), table, residuals=kept)
    assert report.report(ran).peak_bytes == (20, 15)
    assert reported(of, Policy("bfw"), table).peak_bytes == (0, 0)


def test_a_rank_without_work_is_all_fill_and_drain():
    """C15 (c): no microbatch has an image."""
    of = PipelineGraph(3, 1, ((0, 2), (1, 2)), (0, 1, 2), frozenset({(0, 0)}))
    found = reported(of, Policy(), costs.constant(of, 1.0, 2.0))
    assert found.bubbles[0] == Bubble(fill_drain_s=found.makespan_s)
    assert found.peak_in_flight == (0, 1, 1)


def test_classic_1f1b_has_a_bubble_of_p_minus_1_rounds_on_every_rank():
    of = graph.chain(8, (0, 1, 2, 3))
    found = reported(of, FIXED, costs.constant(of, 1.0, 2.0))
    assert [b.total_s for b in found.bubbles] == [9.0] * 4
    assert found.bubble_fraction == pytest.approx(3 / 11)


def test_a_blocking_transfer_is_counted_once():
    """Rank 0 sends 1 to 5, receives 8 to 12, and waits for 1B0 to exist 5 to 8."""
    found = reported(PAIR, Policy(), costs.constant(PAIR, 1.0, 2.0, 4.0), blocking=True)
    assert found.bubbles[0] == Bubble(input_s=3.0, transfer_s=8.0)


def test_a_rank_that_receives_while_work_is_held_is_transferring(tmp_path):
    """Gap 6 to 33: input to 15, receives 0F1 to 19, holds it to 29, receives 0F2."""
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0F2\n1F0,1F2,1F1\n")
    of = PipelineGraph(2, 3, ((0, 1),), (0, 1), frozen=frozenset({0, 1}))
    table = costs.constant(of, 1.0, 1.0, 4.0)
    table.compute[Kind.F, 0] = (1.0, 10.0, 10.0)
    policy = Policy(hint=str(path), order="fixed")
    found = reported(of, policy, table, blocking=True)
    assert found.bubbles[1] == Bubble(5.0, input_s=9.0, transfer_s=8.0, held_s=10.0)


def test_a_rank_that_waits_to_send_holds_nothing_back():
    """No limit; rank 0 has 0F1 ready, but waits for rank 1 to receive 0F0."""
    of = graph.chain(6, (0, 1, 2))
    table = costs.constant(of, [1.0, 5.0, 1.0], [1.0, 5.0, 1.0], 1.0)
    assert reported(of, Policy(), table, blocking=True).bubble.held_s == 0.0


@given(strategies.cases(), st.sampled_from(sorted(MACHINES)))
@laws
def test_the_causes_of_a_rank_sum_to_its_idle_time(case, name):
    """Exactly: the durations are multiples of 0.5."""
    table = costs.applied_to(case.costs(), case.graph)
    made = MACHINES[name](case.graph, case.costs())
    trace = simulator.drive(case.dispatchers(), made)
    found = report.report(trace, blocking=name == "blocking")
    for busy_s, bubble in zip(found.busy_s, found.bubbles, strict=True):
        assert bubble.total_s == found.makespan_s - busy_s
        assert min(bubble.fill_drain_s, bubble.input_s) >= 0
        assert min(bubble.transfer_s, bubble.held_s) >= 0
    work = [table.compute_s(task) for task in case.graph.tasks()]
    assert sum(found.busy_s) == sum(work)
    assert found.bubble.total_s == sum(bubble.total_s for bubble in found.bubbles)


@given(strategies.graphs(), st.sampled_from(policies.RULES), st.integers(0, 999))
@laws
def test_readiness_without_a_limit_holds_nothing(of, rule, seed):
    policy = Policy(hint=rule, in_flight_limit=of.num_microbatches + 1)
    found = reported(of, policy, strategies.random_costs(of, seed))
    assert found.bubble.held_s == 0.0


@given(strategies.cases(), st.sampled_from(sorted(MACHINES)))
@laws
def test_the_lower_bound_is_never_above_the_makespan(case, name):
    table = case.costs()
    trace = simulator.drive(case.dispatchers(), MACHINES[name](case.graph, table))
    assert report.lower_bound_s(case.graph, table) <= trace.makespan_s


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "expected"),
    [
        (
            [1.0, 1.0],
            [2.0, 2.0],
            5 * 3.0 + 3.0,
        ),  # either rank, and the way to the other
        ([1.0, 9.0], [2.0, 9.0], 1.0 + 5 * 18.0 + 2.0),  # the slow last rank
        ([9.0, 1.0], [9.0, 2.0], 5 * 18.0),  # the first: no way in, and none out
    ],
)
def test_the_lower_bound_is_the_busiest_rank_with_its_ways_in_and_out(
    forward_s, backward_s, expected
):
    """Rank 0 has all its work and nothing around it; rank 1 has 0F and 0B around."""
    of = graph.chain(5, (0, 1))
    table = costs.constant(of, forward_s, backward_s)
    assert report.lower_bound_s(of, table) == expected


def test_the_lower_bound_counts_transfers_on_the_longest_path():
    table = costs.constant(PAIR, 1.0, 2.0, 4.0)
    assert report.lower_bound_s(PAIR, table) == 14.0


def test_a_step_that_takes_no_time_has_no_bubble():
    found = report.report(Trace(PAIR))
    assert found.bubble_fraction == 0.0
    assert found.makespan_s == 0.0
