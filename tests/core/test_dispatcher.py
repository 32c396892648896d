"""Stories: what a dispatcher is told, and exactly what it answers."""

import pytest

from rrfp_jax.core import arbiters, back_pressure, dispatcher, graph, hints
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.events import Arrived, Finished, Launch, Send, Started
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from tests.core.instrument import t, ts

CHAIN = graph.chain(2, (0, 1, 2))


def dispatcher_for(
    rank=1, order="", of=CHAIN, launch_ahead=1, limit=32, fixed=False
) -> Dispatcher:
    """Returns a dispatcher whose hint, or fixed order, is `order` (BF where empty)."""
    tasks = ts(order)
    if fixed:
        return Dispatcher(of, rank, arbiters.FixedOrder(tasks), launch_ahead)
    hint = hints.Ordered(tasks) if tasks else hints.Alternating(Kind.B)
    progress = back_pressure.RankProgress(of, rank)
    rules = [back_pressure.InFlight(progress, limit)]
    pressure = back_pressure.BackPressure(progress, rules)
    arbiter = arbiters.ReadinessFirst(of.stages_of[rank], hint, pressure)
    return Dispatcher(of, rank, arbiter, launch_ahead)


def test_ready_backward_overtakes_a_late_forward():
    """The hint wants 1F1 before 1B0, but only 1B0 is ready: launch it."""
    one = dispatcher_for(order="1F0 1F1 1B0 1B1")
    story = [
        Started(),
        Arrived(t("0F0"), to=1),
        Finished(t("1F0")),
        Arrived(t("2B0"), to=1),
    ]
    assert [one.handle(event) for event in story] == [
        [],
        [Launch(t("1F0")), Send(t("1F0"), to=2)],
        [],
        [Launch(t("1B0")), Send(t("1B0"), to=0)],  # a fixed order waits here, for 1F1
    ]


def test_fixed_order_waits_in_the_same_story():
    """The control: the same events, and 1B0 has to wait for 1F1."""
    one = dispatcher_for(order="1F0 1F1 1B0 1B1", fixed=True)
    story = [
        Started(),
        Arrived(t("0F0"), to=1),
        Finished(t("1F0")),
        Arrived(t("2B0"), to=1),
        Arrived(t("0F1"), to=1),
        Finished(t("1F1")),
    ]
    assert [one.handle(event) for event in story] == [
        [],
        [Launch(t("1F0")), Send(t("1F0"), to=2)],
        [],
        [],
        [Launch(t("1F1")), Send(t("1F1"), to=2)],
        [Launch(t("1B0")), Send(t("1B0"), to=0)],
    ]


def test_the_hint_decides_among_several_that_are_ready():
    """While 1F0 runs, both 1F1 and 1B0 become ready; the order names 1B0 first."""
    one = dispatcher_for(order="1F0 1B0 1F1 1B1")
    story = [
        Started(),
        Arrived(t("0F0"), to=1),
        Arrived(t("0F1"), to=1),
        Arrived(t("2B0"), to=1),
        Finished(t("1F0")),
    ]
    assert [one.handle(event) for event in story] == [
        [],
        [Launch(t("1F0")), Send(t("1F0"), to=2)],
        [],
        [],
        [Launch(t("1B0")), Send(t("1B0"), to=0)],
    ]


@pytest.mark.parametrize(
    ("launch_ahead", "at_start", "after_first_finish"),
    [
        (1, "0F0", "0F1"),
        (2, "0F0 0F1", "0F2"),
        (3, "0F0 0F1 0F2", ""),
    ],
)
def test_launch_ahead_is_the_number_of_unfinished_launches(
    launch_ahead, at_start, after_first_finish
):
    first = dispatcher_for(0, of=graph.chain(3, (0, 1)), launch_ahead=launch_ahead)
    answers = [first.handle(Started()), first.handle(Finished(t("0F0")))]
    assert answers == [
        [
            order
            for launched in ts(tasks)
            for order in (Launch(launched), Send(launched, to=1))
        ]
        for tasks in (at_start, after_first_finish)
    ]


def test_dependency_inside_a_rank_is_satisfied_at_launch():
    """A device runs its launches in order, so 1B0 needs no word that 1F0 finished."""
    last = dispatcher_for(1, of=graph.chain(1, (0, 1)), launch_ahead=2)
    assert last.handle(Started()) == []
    assert last.handle(Arrived(t("0F0"), to=1)) == [
        Launch(t("1F0")),
        Launch(t("1B0")),
        Send(t("1B0"), to=0),
    ]


def test_dependency_across_ranks_is_satisfied_at_arrival_only():
    """Its own F is there; the cotangent is what 0B0 waits for."""
    first = dispatcher_for(0, of=graph.chain(1, (0, 1)), launch_ahead=2)
    assert first.handle(Started()) == [Launch(t("0F0")), Send(t("0F0"), to=1)]
    assert first.handle(Finished(t("0F0"))) == []
    assert first.handle(Arrived(t("1B0"), to=0)) == [Launch(t("0B0"))]


def test_a_step_on_one_rank_sends_nothing():
    """Both stages on rank 0: BF alternates over what each launch made ready."""
    both = dispatcher_for(0, of=graph.chain(1, (0, 0)), launch_ahead=9)
    assert both.handle(Started()) == [Launch(task) for task in ts("0F0 1F0 1B0 0B0")]


def test_a_join_waits_for_every_input_in_any_order():
    """Towers 0 and 1 meet at stage 2."""
    towers = graph.PipelineGraph(3, 1, ((0, 2), (1, 2)), (0, 1, 2))
    for order in ("0F0 1F0", "1F0 0F0"):
        join = dispatcher_for(2, of=towers, launch_ahead=2)
        first, second = ts(order)
        assert join.handle(Arrived(first, to=2)) == []
        assert join.handle(Arrived(second, to=2)) == [
            Launch(t("2F0")),
            Launch(t("2B0")),
            Send(t("2B0"), to=1),
            Send(t("2B0"), to=0),
        ]


def test_a_skip_edge_is_sent_beside_the_chain():
    """C13: stage 0 feeds 1 and 3; its two cotangents come in either order."""
    skip = graph.PipelineGraph(4, 1, ((0, 1), (1, 2), (2, 3), (0, 3)), (0, 1, 2, 3))
    first = dispatcher_for(0, of=skip)
    assert first.handle(Started()) == [
        Launch(t("0F0")),
        Send(t("0F0"), to=1),
        Send(t("0F0"), to=3),
    ]
    assert first.handle(Finished(t("0F0"))) == []
    assert first.handle(Arrived(t("3B0"), to=0)) == []
    assert first.handle(Arrived(t("1B0"), to=0)) == [Launch(t("0B0"))]


def test_back_pressure_withholds_the_forward_and_admits_the_backward():
    """limit=1: 1F1 is ready, but microbatch 0 has to end here first."""
    one = dispatcher_for(limit=1, launch_ahead=2)
    story = [
        Started(),
        Arrived(t("0F0"), to=1),
        Arrived(t("0F1"), to=1),
        Arrived(t("2B0"), to=1),
        Finished(t("1F0")),
    ]
    assert [one.handle(event) for event in story] == [
        [],
        [Launch(t("1F0")), Send(t("1F0"), to=2)],
        [],
        [Launch(t("1B0")), Send(t("1B0"), to=0)],
        [Launch(t("1F1")), Send(t("1F1"), to=2)],
    ]


def test_done_means_launched_and_finished():
    only = dispatcher_for(0, of=graph.chain(1, (0,)), launch_ahead=2)
    assert not only.is_done
    assert only.handle(Started()) == [Launch(t("0F0")), Launch(t("0B0"))]
    only.handle(Finished(t("0F0")))
    assert not only.is_done
    only.handle(Finished(t("0B0")))
    assert only.is_done


def test_launching_nothing_ahead_is_refused():
    with pytest.raises(ConfigError, match=r"pipeline.launch_ahead=0 launches nothing"):
        dispatcher_for(launch_ahead=0)


def test_explain_names_what_is_missing_and_what_is_held():
    one = dispatcher_for(limit=1)
    for event in [Started(), Arrived(t("0F0"), 1), Finished(t("1F0"))]:
        one.handle(event)
    one.handle(Arrived(t("0F1"), 1))
    assert one.explain() == [
        "1F1 held by back-pressure (limit=1)",
        "1B0 misses 2B0",
        "1B1 misses 2B1 1F1",
    ]


def test_explain_under_a_fixed_order_names_the_task_it_waits_for():
    one = dispatcher_for(order="1F0 1F1 1B0 1B1", fixed=True)
    for event in [Started(), Arrived(t("0F1"), 1)]:
        one.handle(event)
    assert one.explain()[0] == "1F1 held by the order, which waits for 1F0"


def test_the_message_of_a_stall_goes_rank_by_rank_and_is_cut():
    """Rank 0 is held at its limit; rank 1 misses 14 inputs, of which 12 are named."""
    seven = graph.chain(7, (0, 1))
    first, last = (dispatcher_for(rank, of=seven, limit=6) for rank in (0, 1))
    first.handle(Started())
    for j in range(6):
        first.handle(Finished(t(f"0F{j}")))
    assert dispatcher.explain_stall([first, last]).splitlines() == [
        "rank 0 has 8 tasks left; none running or in transit.",
        "  0F6 held by back-pressure (limit=6)",
        *(f"  0B{j} misses 1B{j}" for j in range(6)),
        "  0B6 misses 1B6 0F6",
        "rank 1 has 14 tasks left; none running or in transit.",
        *(line for j in range(6) for line in _misses(j)),
        "  and 2 more",
    ]


def _misses(j):
    return f"  1F{j} misses 0F{j}", f"  1B{j} misses 1F{j}"
