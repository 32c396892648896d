"""Transfers that occupy both ranks: exact stories, and no lock-up."""

import itertools

from hypothesis import given, settings

from rrfp_jax.core import graph
from rrfp_jax.core.events import Arrived, Finished
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Span, Told, Transfer
from rrfp_jax.sim import costs, machine, simulator
from tests.core import strategies
from tests.core.instrument import t

FIXED = Policy(hint="1f1b", order="fixed")


def ran(of, policy, *durations):
    """Simulates one step with blocking links."""
    return simulator.simulate(of, policy, costs.constant(of, *durations), blocking=True)


def by_start(records):
    """Sorts spans or transfers by time."""
    return sorted(records, key=lambda r: (r.start_s, str(r[0])))


def test_one_microbatch_by_hand():
    """F = 1, B = 2, link 4: everything happens one after another."""
    trace = ran(graph.chain(1, (0, 1)), Policy(), 1.0, 2.0, 4.0)
    assert by_start(trace.spans) == [
        Span(t("0F0"), 0, 0.0, 1.0),
        Span(t("1F0"), 1, 5.0, 6.0),
        Span(t("1B0"), 1, 6.0, 8.0),
        Span(t("0B0"), 0, 12.0, 14.0),
    ]
    assert by_start(trace.transfers) == [
        Transfer(t("0F0"), 1, 1.0, 5.0),
        Transfer(t("1B0"), 0, 8.0, 12.0),
    ]


def test_two_microbatches_by_hand():
    """F = 1 and 0.5, B = 2, link 1, 1F1B.

    Rank 0 has 0F1 to send from 3 on, but rank 1 is at 1B0 until 4.5. Then both ranks
    have something to send, and 0F1 waits longer, so it goes first.
    """
    trace = ran(graph.chain(2, (0, 1)), FIXED, [1.0, 0.5], 2.0, 1.0)
    assert by_start(trace.transfers) == [
        Transfer(t("0F0"), 1, 1.0, 2.0),
        Transfer(t("0F1"), 1, 4.5, 5.5),
        Transfer(t("1B0"), 0, 5.5, 6.5),
        Transfer(t("1B1"), 0, 9.0, 10.0),
    ]
    assert by_start(trace.spans) == [
        Span(t("0F0"), 0, 0.0, 1.0),
        Span(t("0F1"), 0, 2.0, 3.0),
        Span(t("1F0"), 1, 2.0, 2.5),
        Span(t("1B0"), 1, 2.5, 4.5),
        Span(t("0B0"), 0, 6.5, 8.5),
        Span(t("1F1"), 1, 6.5, 7.0),
        Span(t("1B1"), 1, 7.0, 9.0),
        Span(t("0B1"), 0, 10.0, 12.0),
    ]


def test_sends_in_opposite_directions_take_turns():
    """Both ranks have finished and send to each other: a naive send would lock up."""
    of = PipelineGraph(4, 1, ((0, 2), (1, 3), (2, 3)), (0, 1, 1, 0))
    trace = ran(of, Policy(), 1.0, 1.0, 5.0)
    first, second, *_ = by_start(trace.transfers)
    assert {first.source, second.source} == {t("0F0"), t("1F0")}
    assert (first.start_s, first.end_s) == (1.0, 6.0)
    assert second.start_s == 6.0


def test_a_rank_is_free_only_after_each_of_its_sends():
    """0F0 goes to stages 1 and 2, one after the other; 0F1 begins after both."""
    of = PipelineGraph(3, 2, ((0, 1), (0, 2), (1, 2)), (0, 1, 2))
    trace = ran(of, Policy(), 1.0, 1.0, 3.0)
    sends = [m for m in by_start(trace.transfers) if m.source == t("0F0")]
    assert [(m.start_s, m.end_s) for m in sends] == [(1.0, 4.0), (4.0, 7.0)]
    begun = {span.task: span.start_s for span in trace.spans}
    assert begun[t("0F1")] >= 7.0


def test_free_transfers_between_balanced_stages_do_not_slow_1f1b():
    """With B = F no rank computes when its neighbour has something to send."""
    of = graph.chain(8, (0, 1, 2, 3))
    assert ran(of, FIXED, 1.0, 1.0, 0.0).makespan_s == 11 * 2.0


def test_a_blocking_machine_tells_nothing_before_its_time():
    """The emulated devices poll it: asked for less than is due, it answers nothing."""
    of = graph.chain(1, (0, 1))
    one = machine.Blocking(of, costs.constant(of, 1.0, 1.0, 4.0))
    one.launch(t("0F0"), 0.0)
    one.send(t("0F0"), 1, 0.0)
    assert one.next_due_s() == 1.0
    assert one.pop(until_s=0.9) is None
    assert one.next_due_s() == 1.0  # asking has not moved its clock
    assert one.pop(until_s=4.9) is None  # it has computed and is sending
    assert one.next_due_s() == 5.0
    found = [one.pop(until_s=5.0), one.pop(until_s=5.0)]
    assert found == [
        Told(5.0, 1, Arrived(t("0F0"), 1)),
        Told(5.0, 0, Finished(t("0F0"))),
    ]
    assert one.next_due_s() is None


@given(strategies.cases())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_no_rank_ever_does_two_things_and_every_transfer_holds_both(case):
    """Spans and transfers that touch one rank never overlap."""
    trace = simulator.drive(
        case.dispatchers(), machine.Blocking(case.graph, case.costs())
    )
    for rank in range(case.graph.num_ranks):
        held = [(s.start_s, s.end_s) for s in trace.spans if s.rank == rank]
        held += [
            (m.start_s, m.end_s)
            for m in trace.transfers
            if rank in (case.graph.rank_of(m.source), case.graph.placement[m.to])
        ]
        held.sort()
        for (_, end), (start, _) in itertools.pairwise(held):
            assert start >= end


@given(strategies.cases())
@settings(derandomize=True, deadline=None, max_examples=120)
def test_a_transfer_begins_after_its_source_and_ends_before_its_target(case):
    """On both machines."""
    for make in (machine.Overlapped, machine.Blocking):
        trace = simulator.drive(case.dispatchers(), make(case.graph, case.costs()))
        spans = {span.task: span for span in trace.spans}
        arrived = {(m.source, m.to): m for m in trace.transfers}
        assert len(arrived) == len(trace.transfers)
        for span in trace.spans:
            for source in case.graph.inputs(span.task):
                if case.graph.rank_of(source) == span.rank:
                    assert spans[source].end_s <= span.start_s
                    continue
                moved = arrived.pop((source, span.task.stage))
                assert spans[source].end_s <= moved.start_s <= moved.end_s
                assert moved.end_s <= span.start_s
        assert not arrived, "a payload that nobody needs"


@given(strategies.cases(strategies.chains()))
@settings(derandomize=True, deadline=None, max_examples=50)
def test_durations_are_those_of_the_table(case):
    """Each task and each transfer takes exactly its time, on both machines."""
    table = costs.applied_to(case.costs(), case.graph)
    for make in (machine.Overlapped, machine.Blocking):
        trace = simulator.drive(case.dispatchers(), make(case.graph, case.costs()))
        for span in trace.spans:
            assert span.end_s - span.start_s == table.compute_s(span.task)
        for moved in trace.transfers:
            seconds = table.transfer_s(moved.source, moved.to)
            assert moved.end_s - moved.start_s == seconds
