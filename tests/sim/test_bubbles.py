"""Every moment of a rank is a task or one bubble, which says what it was for."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import graph
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Trace
from rrfp_jax.sim import bubbles, costs, machine, simulator
from rrfp_jax.sim.bubbles import Cause, Idle
from tests.core import strategies
from tests.core.instrument import t

laws = settings(derandomize=True, deadline=None, max_examples=120)
PAIR = graph.chain(1, (0, 1))
MACHINES = {"overlapped": machine.Overlapped, "blocking": machine.Blocking}


def test_a_bubble_names_its_cause_what_came_next_and_what_that_waited_for():
    """F = 1, B = 2, link 4: 1F0 runs 5 to 6, 1B0 6 to 8, 0B0 12 to 14."""
    table = costs.constant(PAIR, 1.0, 2.0, 4.0)
    first, second = bubbles.find(simulator.simulate(PAIR, Policy(), table))
    assert first == [
        Idle(0, 1.0, 8.0, Cause.INPUT, t("0B0"), t("1B0")),
        Idle(0, 8.0, 12.0, Cause.TRANSFER, t("0B0"), t("1B0")),
    ]
    assert second == [
        Idle(1, 0.0, 5.0, Cause.FILL, t("1F0"), t("0F0")),
        Idle(1, 8.0, 14.0, Cause.DRAIN, None, None),
    ]


def test_what_an_order_holds_ends_with_the_task_that_the_order_wants():
    """Text-only 1F2 is ready from the start; the order waits for 1F1, 3 to 11."""
    of = PipelineGraph(2, 3, ((0, 1),), (0, 1), frozenset({(0, 2)}), frozenset({0}))
    table = costs.constant(of, 1.0, 1.0)
    table.compute[Kind.F, 0] = (1.0, 10.0, 0.0)
    fixed = Policy(hint="1f1b", order="fixed")
    _, second = bubbles.find(simulator.simulate(of, fixed, table))
    assert second[1:] == [Idle(1, 3.0, 11.0, Cause.HELD, t("1F1"), t("0F1"))]


def test_a_rank_without_work_fills_all_the_time():
    of = PipelineGraph(3, 1, ((0, 2), (1, 2)), (0, 1, 2), frozenset({(0, 0)}))
    ran = simulator.simulate(of, Policy(), costs.constant(of, 1.0, 2.0))
    assert bubbles.find(ran)[0] == [Idle(0, 0.0, 6.0, Cause.FILL, None, None)]


def test_a_gap_is_cut_where_its_cause_changes(tmp_path):
    """Gap 6 to 33: input to 15, receives 0F1 to 19, holds it to 29, receives 0F2."""
    path = tmp_path / "order.csv"
    path.write_text("0F0,0F1,0F2\n1F0,1F2,1F1\n")
    of = PipelineGraph(2, 3, ((0, 1),), (0, 1), frozen=frozenset({0, 1}))
    table = costs.constant(of, 1.0, 1.0, 4.0)
    table.compute[Kind.F, 0] = (1.0, 10.0, 10.0)
    policy = Policy(hint=str(path), order="fixed")
    ran = simulator.simulate(of, policy, table, blocking=True)
    _, *gap = bubbles.find(ran, blocking=True)[1]
    assert gap == [
        Idle(1, start_s, end_s, cause, t("1F2"), t("0F2"))
        for start_s, end_s, cause in [
            (6.0, 15.0, Cause.INPUT),
            (15.0, 19.0, Cause.TRANSFER),
            (19.0, 29.0, Cause.HELD),
            (29.0, 33.0, Cause.TRANSFER),
        ]
    ]


@given(strategies.cases(), st.sampled_from(sorted(MACHINES)))
@laws
def test_tasks_and_bubbles_follow_each_other_without_a_gap(case, name):
    trace = simulator.drive(
        case.dispatchers(), MACHINES[name](case.graph, case.costs())
    )
    found = bubbles.find(trace, blocking=name == "blocking")
    for rank, (idle, spans) in enumerate(zip(found, trace.by_rank(), strict=True)):
        assert idle == sorted(idle, key=lambda each: each.start_s)
        assert all(each.rank == rank for each in idle)
        times = sorted((each.start_s, each.end_s) for each in [*idle, *spans])
        ends = [0.0, *itertools.chain(*times), trace.makespan_s]
        assert ends[::2] == ends[1::2]


@given(strategies.cases())
@laws
def test_a_bubble_before_a_task_awaits_the_input_that_came_last(case):
    made = machine.Overlapped(case.graph, case.costs())
    trace = simulator.drive(case.dispatchers(), made)
    ended = {span.task: span.end_s for span in trace.spans}
    began = {span.task: span.start_s for span in trace.spans}
    came = {(m.source, m.to): m.end_s for m in trace.transfers}
    for idle in itertools.chain(*bubbles.find(trace)):
        if idle.until is None:
            assert idle.cause in (Cause.DRAIN, Cause.FILL)
            assert idle.awaited is None
            continue
        assert idle.end_s <= began[idle.until]
        there = {
            source: came.get((source, idle.until.stage), ended[source])
            for source in case.graph.inputs(idle.until)
        }
        assert (idle.awaited is None) == (not there)
        if idle.awaited is not None:
            assert there[idle.awaited] == max(there.values())


@pytest.mark.parametrize("blocking", [False, True])
def test_an_empty_step_has_no_bubble(blocking):
    assert bubbles.find(Trace(PAIR), blocking) == [[], []]
