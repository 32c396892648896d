"""The record of a step: counts, pictures, stories, JSON and replay."""

import json

import pytest

from rrfp_jax.core import events, graph, placement, policies, trace
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.trace import Span, Told, Trace, Transfer
from rrfp_jax.errors import InvariantError
from rrfp_jax.sim import costs, simulator
from tests.core.instrument import t, ts

CHAIN = graph.chain(4, (0, 1, 2))
FIXED = Policy(hint="1f1b", order="fixed")


def ran(of=CHAIN, policy=FIXED, transfer_s=0.5):
    """Simulates one step with F = 1 s, B = 2 s."""
    return simulator.simulate(of, policy, costs.constant(of, 1.0, 2.0, transfer_s))


def launched(of, *orders):
    """Returns a trace of back-to-back tasks of 1 s."""
    found = Trace(of)
    for rank, order in enumerate(orders):
        spans = enumerate(ts(order))
        found.spans += [Span(task, rank, i, i + 1.0) for i, task in spans]
    return found


def test_launches_and_spans_are_by_rank_in_launch_order():
    found = launched(graph.chain(2, (0, 1)), "0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")
    assert found.launches() == [ts("0F0 0F1 0B0 0B1"), ts("1F0 1B0 1F1 1B1")]
    assert found.by_rank()[1][2] == Span(t("1F1"), 1, 2.0, 3.0)
    assert found.makespan_s == 4.0
    assert Trace(CHAIN).makespan_s == 0.0


@pytest.mark.parametrize(
    ("order", "peak"),
    [
        ("0F0 0B0 0F1 0B1 0F2 0B2", 1),
        ("0F0 0F1 0B0 0F2 0B1 0B2", 2),
        ("0F2 0F0 0F1 0B1 0B2 0B0", 3),
    ],
)
def test_peak_in_flight_counts_microbatches_begun_and_not_finished(order, peak):
    assert launched(graph.chain(3, (0,)), order).peak_in_flight() == [peak]


def test_peak_in_flight_counts_a_microbatch_once_whatever_its_chunks():
    """Rank 0 holds stages 0 and 3."""
    of = graph.chain(1, placement.v_shaped(2))
    assert launched(of, "0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0").peak_in_flight() == [1, 1]


def test_peak_in_flight_of_a_frozen_stage_is_one_at_a_time():
    of = PipelineGraph(2, 3, ((0, 1),), (0, 1), frozen=frozenset({0}))
    found = launched(of, "0F0 0F1 0F2", "1F0 1F1 1B0 1B1 1F2 1B2")
    assert found.peak_in_flight() == [1, 2]


def test_the_grid_is_the_picture_of_1f1b():
    """Golden: 15 s in 60 columns. If it changes, look at it, then copy it here."""
    assert ran().grid(60).splitlines() == [
        "rank  0 |F0F1-F2-................B0----F3B1----.....B2----.....B3----|",
        "rank  1 |....F0F1--.......B0----F2B1----...F3B2----.....B3----.......|",
        "rank  2 |........F0B0----F1-B1----..F2-B2---...F3B3----..............|",
    ]


def test_the_grid_names_the_stage_where_a_rank_holds_several():
    """Both ranks of the V hold two stages."""
    of = graph.chain(2, placement.v_shaped(2))
    grid = simulator.simulate(of, Policy(), costs.constant(of, 1.0, 1.0)).grid(36)
    assert [line.count("3F0") for line in grid.splitlines()] == [1, 0]
    assert [line.count("2B1") for line in grid.splitlines()] == [0, 1]


@pytest.mark.parametrize("num_columns", [1, 2, 7, 40])
def test_every_line_of_a_grid_is_as_wide_as_asked(num_columns):
    """Also where tasks are narrower than a column, or take no time at all."""
    no_time = simulator.simulate(CHAIN, FIXED, costs.constant(CHAIN, 0.0, 0.0))
    for found in (ran(), no_time):
        for line in found.grid(num_columns).splitlines():
            assert len(line) == len("rank  0 ||") + num_columns


def test_the_story_of_a_task_is_in_order_of_time():
    """Golden: its inputs, its arrival, its life."""
    assert ran().story(t("1B0")).splitlines() == [
        "  2500.000 ms  1F0 ended on rank 1",
        "  6000.000 ms  2B0 ended on rank 2",
        "  6500.000 ms  1B0 began on rank 1",
        "  6500.000 ms  2B0 arrived",
        "  8500.000 ms  1B0 ended",
    ]


def test_json_is_one_object_that_people_can_read():
    data = json.loads(trace.to_json(ran(graph.chain(1, (0, 1)))))
    assert data["graph"]["placement"] == [0, 1]
    assert data["spans"][0] == ["0F0", 0.0, 1.0]
    assert data["transfers"][0] == ["0F0", 1, 1.0, 1.5]
    assert data["log"][:3] == [
        [0.0, 0, "Started"],
        [0.0, 1, "Started"],
        [1.0, 0, "Finished", "0F0"],
    ]
    assert data["log"][3] == [1.5, 1, "Arrived", "0F0", 1]


def test_json_keeps_pruning_and_every_bit_of_a_time():
    of = PipelineGraph(
        3, 2, ((0, 2), (1, 2)), (0, 1, 1), frozenset({(0, 1)}), frozenset({1})
    )
    found = simulator.simulate(of, Policy(), costs.constant(of, 0.1, 1 / 3, 1e-9))
    copy = trace.from_json(trace.to_json(found))
    assert copy == found
    assert copy.graph == of


def test_traces_that_differ_are_unequal():
    one, other = ran(), ran()
    assert one == other
    other.transfers[-1] = Transfer(t("0F0"), 1, 0.0, 9.0)
    assert one != other
    assert one != "a trace"


def test_an_event_that_is_not_known_is_refused():
    data = json.loads(trace.to_json(ran()))
    data["log"][2] = [1.0, 0, "Exploded", "0F0"]
    with pytest.raises((ValueError, RuntimeError)):
        trace.from_json(json.dumps(data))


def test_replay_launches_what_the_trace_says():
    found = ran(policy=Policy())
    fresh = policies.dispatchers(CHAIN, Policy())
    assert trace.replay(found, fresh) == found.launches()


def test_replay_under_another_policy_shows_another_sequence():
    found = ran()
    other = policies.dispatchers(CHAIN, Policy(hint="gpipe"))
    assert trace.replay(found, other) != found.launches()


def test_replay_of_a_log_with_a_hole_is_an_error():
    """Without its input 1F0 cannot launch, so it cannot finish either."""
    found = ran()
    found.log.remove(Told(1.5, 1, events.Arrived(t("0F0"), 1)))
    with pytest.raises(
        InvariantError, match="1F0 finished on rank 1 but is not running"
    ):
        trace.replay(found, policies.dispatchers(CHAIN, FIXED))


def test_replay_of_half_a_log_is_an_error():
    found = ran()
    del found.log[-1]
    with pytest.raises(InvariantError, match="leave tasks undone"):
        trace.replay(found, policies.dispatchers(CHAIN, FIXED))


def test_the_log_holds_every_event_once():
    """4 microbatches: 24 finishes, 16 arrivals, 3 starts."""
    kinds = [type(told.event) for told in ran().log]
    assert kinds.count(events.Finished) == 24
    assert kinds.count(events.Arrived) == 16
    assert kinds.count(events.Started) == 3
    assert isinstance(ran().log[0], Told)
