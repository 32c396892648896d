"""Links beside the ranks: when exactly each task and each transfer runs."""

import pytest

from rrfp_jax.core import events, graph
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Span, Told, Transfer
from rrfp_jax.sim import costs, simulator
from rrfp_jax.sim.machine import Overlapped
from tests.core.instrument import t

PAIR = graph.chain(4, (0, 1))


def drained(machine):
    """Returns all events due, in order."""
    found = []
    while (due_s := machine.next_due_s()) is not None:
        assert machine.pop(due_s - 0.001) is None
        told = machine.pop(due_s)
        assert told.time_s == due_s
        found.append(told)
    return found


def test_a_rank_runs_its_launches_first_in_first_out():
    """Launched at 0 and 0.5 with 2 s each: the second begins when the first ends."""
    machine = Overlapped(PAIR, costs.constant(PAIR, 2.0, 3.0))
    machine.launch(t("0F1"), 0.0)
    machine.launch(t("0F0"), 0.5)
    machine.launch(t("1F0"), 0.5)
    assert machine.trace.spans == [
        Span(t("0F1"), 0, 0.0, 2.0),
        Span(t("0F0"), 0, 2.0, 4.0),
        Span(t("1F0"), 1, 0.5, 2.5),
    ]
    assert drained(machine) == [
        Told(2.0, 0, events.Finished(t("0F1"))),
        Told(2.5, 1, events.Finished(t("1F0"))),
        Told(4.0, 0, events.Finished(t("0F0"))),
    ]


def test_an_idle_rank_begins_when_it_is_told():
    machine = Overlapped(PAIR, costs.constant(PAIR, 2.0, 3.0))
    machine.launch(t("0F0"), 7.0)
    assert machine.trace.spans == [Span(t("0F0"), 0, 7.0, 9.0)]


def test_a_link_carries_its_payloads_first_in_first_out():
    """Compute takes 1 s and a transfer 3 s: the link is the bottleneck."""
    machine = Overlapped(PAIR, costs.constant(PAIR, 1.0, 1.0, transfer_s=3.0))
    for j in range(3):
        machine.launch(t(f"0F{j}"), 0.0)
        machine.send(t(f"0F{j}"), 1, 0.0)
    assert machine.trace.transfers == [
        Transfer(t("0F0"), 1, 1.0, 4.0),
        Transfer(t("0F1"), 1, 4.0, 7.0),
        Transfer(t("0F2"), 1, 7.0, 10.0),
    ]
    arrivals = [told for told in drained(machine) if told.rank == 1]
    assert arrivals == [
        Told(4.0, 1, events.Arrived(t("0F0"), 1)),
        Told(7.0, 1, events.Arrived(t("0F1"), 1)),
        Told(10.0, 1, events.Arrived(t("0F2"), 1)),
    ]


def test_each_direction_and_each_pair_of_ranks_has_a_link_of_its_own():
    """0 -> 1, 0 -> 2 and 1 -> 0 work at the same time."""
    of = PipelineGraph(3, 1, ((0, 1), (0, 2), (1, 2)), (0, 1, 2))
    machine = Overlapped(of, costs.constant(of, 1.0, 1.0, transfer_s=5.0))
    machine.launch(t("0F0"), 0.0)
    machine.send(t("0F0"), 1, 0.0)
    machine.send(t("0F0"), 2, 0.0)
    machine.launch(t("1B0"), 0.0)
    machine.send(t("1B0"), 0, 0.0)
    assert [(m.start_s, m.end_s) for m in machine.trace.transfers] == [(1.0, 6.0)] * 3


def test_two_edges_between_the_same_ranks_share_their_link():
    """Stages 1 and 2 both live on rank 1."""
    of = PipelineGraph(3, 1, ((0, 1), (0, 2), (1, 2)), (0, 1, 1))
    machine = Overlapped(of, costs.constant(of, 1.0, 1.0, transfer_s=5.0))
    machine.launch(t("0F0"), 0.0)
    machine.send(t("0F0"), 1, 0.0)
    machine.send(t("0F0"), 2, 0.0)
    assert [m.start_s for m in machine.trace.transfers] == [1.0, 6.0]


def test_what_arrives_is_known_before_a_rank_is_free_in_the_same_instant():
    """1F0 ends at 2 and 0F1 arrives at 2: rank 1 must see it when it is free."""
    machine = Overlapped(PAIR, costs.constant(PAIR, 1.0, 1.0))
    machine.launch(t("1F0"), 1.0)
    machine.launch(t("0F1"), 1.0)
    machine.send(t("0F1"), 1, 1.0)
    first, *_ = drained(machine)
    assert first == Told(2.0, 1, events.Arrived(t("0F1"), 1))


def test_nothing_under_way_is_nothing_due():
    assert Overlapped(PAIR, costs.constant(PAIR, 1.0, 1.0)).next_due_s() is None


def test_a_step_of_two_ranks_by_hand():
    """F = 1, B = 2, link 0.5, M = 2, BF, one launch at a time."""
    of = graph.chain(2, (0, 1))
    table = costs.constant(of, 1.0, 2.0, transfer_s=0.5)
    trace = simulator.simulate(of, Policy(launch_ahead=1), table)
    assert sorted(trace.spans, key=lambda s: (s.rank, s.start_s)) == [
        Span(t("0F0"), 0, 0.0, 1.0),
        Span(t("0F1"), 0, 1.0, 2.0),
        Span(t("0B0"), 0, 5.0, 7.0),
        Span(t("0B1"), 0, 8.0, 10.0),
        Span(t("1F0"), 1, 1.5, 2.5),
        Span(t("1B0"), 1, 2.5, 4.5),
        Span(t("1F1"), 1, 4.5, 5.5),
        Span(t("1B1"), 1, 5.5, 7.5),
    ]
    assert sorted(trace.transfers, key=lambda m: m.start_s) == [
        Transfer(t("0F0"), 1, 1.0, 1.5),
        Transfer(t("0F1"), 1, 2.0, 2.5),
        Transfer(t("1B0"), 0, 4.5, 5.0),
        Transfer(t("1B1"), 0, 7.5, 8.0),
    ]


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [(1, "0F0 0F1 0B0 0F2 0B1 0B2"), (2, "0F0 0F1 0F2 0B0 0B1 0B2")],
)
def test_launch_ahead_commits_before_the_gradient_is_here(ahead, expected):
    """1B0 arrives at 12, during 0F1; a launch ahead put 0F2 behind 0F1 at 10."""
    of = graph.chain(3, (0, 1))
    table = costs.constant(of, [10.0, 1.0], 1.0)
    trace = simulator.simulate(of, Policy(launch_ahead=ahead), table)
    assert " ".join(map(str, trace.launches()[0])) == expected


@pytest.mark.parametrize(
    ("num_ranks", "count"), [(1, 1), (1, 5), (2, 2), (4, 8), (8, 9)]
)
@pytest.mark.parametrize(
    ("forward_s", "backward_s"), [(1.0, 1.0), (1.0, 2.0), (3.0, 1.0)]
)
def test_classic_1f1b_takes_p_minus_1_plus_m_rounds(
    num_ranks, count, forward_s, backward_s
):
    """(P - 1 + M)(F + B) where transfers are free; GPipe takes the same."""
    of = graph.chain(count, tuple(range(num_ranks)))
    table = costs.constant(of, forward_s, backward_s)
    expected = (num_ranks - 1 + count) * (forward_s + backward_s)
    for hint in ("1f1b", "gpipe"):
        trace = simulator.simulate(of, Policy(hint=hint, order="fixed"), table)
        assert trace.makespan_s == pytest.approx(expected)


def test_interleaving_divides_the_bubble_by_the_chunks():
    """arXiv:2104.04473 §2.2: (P - 1)(F + B) / C, with chunks of 1 / C the work."""
    for chunks in (1, 2, 4):
        of = graph.chain(8, tuple(range(4)) * chunks)
        table = costs.constant(of, 1.0 / chunks, 2.0 / chunks)
        trace = simulator.simulate(of, Policy(hint="1f1b", order="fixed"), table)
        assert trace.makespan_s == pytest.approx(8 * 3.0 + 3 * 3.0 / chunks)


def test_a_slow_tower_delays_no_one_who_can_work():
    """Microbatch 0 has a slow image: BF runs the text-only 1 meanwhile, 1F1B cannot."""
    of = PipelineGraph(2, 2, ((0, 1),), (0, 1), skipped=frozenset({(0, 1)}))
    table = costs.constant(of, 1.0, 1.0)
    table.compute[Kind.F, 0] = (10.0, 10.0)
    ready = simulator.simulate(of, Policy(), table)
    fixed = simulator.simulate(of, Policy(order="fixed"), table)
    assert " ".join(map(str, ready.launches()[1])) == "1F1 1B1 1F0 1B0"
    assert (ready.makespan_s, fixed.makespan_s) == (13.0, 14.0)
