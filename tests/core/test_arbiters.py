"""The baselines: what waits, and for what."""

import pytest

from rrfp_jax.core import arbiters, back_pressure, graph, hints
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from tests.core.instrument import t, ts

ORDER = ts("0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3")


def take_all(arbiter):
    """Launches what is chosen until the arbiter waits."""
    taken = []
    while (task := arbiter.choose()) is not None:
        assert arbiter.choose() == task  # choosing consumes nothing
        arbiter.launched(task)
        taken.append(task)
    return taken


def fed(arbiter, tasks):
    """Makes `tasks` ready and returns what is taken then."""
    for task in ts(tasks):
        arbiter.add(task)
    return take_all(arbiter)


def readiness_first(limit=9):
    """Returns BF on stage 0 of two."""
    of = graph.chain(4, (0, 1))
    progress = back_pressure.RankProgress(of, 0)
    rules = [back_pressure.InFlight(progress, limit)]
    pressure = back_pressure.BackPressure(progress, rules)
    return arbiters.ReadinessFirst((0,), hints.Alternating(Kind.B), pressure)


def test_fixed_order_waits_although_work_is_ready():
    """0B0 is late: it takes nothing else until 0B0 is here, then catches up."""
    arbiter = arbiters.FixedOrder(ORDER)
    assert fed(arbiter, "0F3 0F2 0F1 0F0") == ts("0F0 0F1")
    assert arbiter.ready() == ts("0F2 0F3")
    assert arbiter.why_held(t("0F2")) == "0F2 held by the order, which waits for 0B0"
    assert fed(arbiter, "0B1") == []
    assert fed(arbiter, "0B0") == ts("0B0 0F2 0B1 0F3")
    assert fed(arbiter, "0B3 0B2") == ts("0B2 0B3")
    assert arbiter.choose() is None


def test_opportunistic_pulls_the_next_forward_ahead_of_a_late_gradient():
    """Varuna: 0B0 is late, so 0F2 goes ahead; with the limit 3, 0F3 does not."""
    arbiter = arbiters.Opportunistic(ORDER, limit=3)
    assert fed(arbiter, "0F0 0F1 0F2 0F3") == ts("0F0 0F1 0F2")
    assert arbiter.ready() == ts("0F3")
    assert arbiter.why_held(t("0F3")) == "0F3 held by the order, which waits for 0B0"
    assert fed(arbiter, "0B0") == ts("0B0 0F3")
    assert fed(arbiter, "0B1 0B2 0B3") == ts("0B1 0B2 0B3")


def test_opportunistic_waits_for_a_late_forward_and_never_reorders_gradients():
    """Only a forward may go ahead, and only for a backward that is late."""
    arbiter = arbiters.Opportunistic(ORDER, limit=8)
    assert fed(arbiter, "0F1 0F2") == []  # 0F0 is next: a forward, so wait
    assert fed(arbiter, "0F0") == ts("0F0 0F1 0F2")
    assert fed(arbiter, "0B1") == []  # 0B0 comes first, and 0F3 is not here
    assert fed(arbiter, "0B0") == ts("0B0 0B1")


def test_opportunistic_takes_forwards_in_their_order():
    """0F2 is the earliest forward left; 0F3 may not pass it."""
    arbiter = arbiters.Opportunistic(ORDER, limit=8)
    assert fed(arbiter, "0F0 0F1 0F3") == ts("0F0 0F1")
    assert fed(arbiter, "0F2") == ts("0F2 0F3")


def test_opportunistic_at_its_limit_is_the_fixed_order():
    """With the limit that 1F1B has anyway, nothing is pulled ahead."""
    fixed, other = arbiters.FixedOrder(ORDER), arbiters.Opportunistic(ORDER, limit=2)
    for tasks in ("0F0 0F1 0F2 0F3", "0B1", "0B0", "0B2", "0B3"):
        assert fed(fixed, tasks) == fed(other, tasks)


def test_opportunistic_counts_only_forwards_that_have_a_backward():
    """Stage 0 is frozen: its forwards hold nothing, so they never reach the limit."""
    order = ts("1F0 0F0 1B0 0F1 0F2 1F1 1B1 1F2 1B2")
    arbiter = arbiters.Opportunistic(order, limit=2)
    assert fed(arbiter, "1F0 0F0 0F1 0F2") == ts("1F0 0F0 0F1 0F2")


def test_opportunistic_needs_a_limit_of_one():
    with pytest.raises(ConfigError, match="in_flight_limit=0 lets no microbatch start"):
        arbiters.Opportunistic(ORDER, limit=0)


def test_readiness_first_takes_what_the_hint_ranks_first_until_pressure_holds():
    arbiter = readiness_first(limit=2)
    assert fed(arbiter, "0F3 0F1 0F0 0F2") == ts("0F0 0F1")
    assert arbiter.ready() == ts("0F2 0F3")
    assert arbiter.why_held(t("0F2")) == "0F2 held by back-pressure (limit=2)"
    assert fed(arbiter, "0B1") == ts("0B1 0F2")  # it frees a slot
    assert fed(arbiter, "0B0") == ts("0B0 0F3")


def test_readiness_first_goes_on_from_a_launch_that_it_did_not_choose():
    """A group agreed on 0F2 when only that was ready at all: it counts as begun."""
    arbiter = readiness_first(limit=2)
    for task in ts("0F0 0F1 0F2"):
        arbiter.add(task)
    assert arbiter.choose() == t("0F0")
    arbiter.launched(t("0F2"))
    assert arbiter.ready() == ts("0F0 0F1")
    assert take_all(arbiter) == ts("0F0")  # the limit counts 0F2
    assert fed(arbiter, "0B2") == ts("0B2 0F1")


def test_orders_skip_what_was_launched_before_its_turn():
    for arbiter in (arbiters.FixedOrder(ORDER), arbiters.Opportunistic(ORDER, 9)):
        for task in ts("0F0 0F1"):
            arbiter.add(task)
        arbiter.launched(t("0F1"))
        assert take_all(arbiter) == ts("0F0")
        assert fed(arbiter, "0B0") == ts("0B0")
        assert fed(arbiter, "0F3 0F2") == ts("0F2") + ts("0F3") * (
            type(arbiter) is arbiters.Opportunistic
        )


@pytest.mark.parametrize(
    "make",
    [
        readiness_first,
        lambda: arbiters.FixedOrder(ORDER),
        lambda: arbiters.Opportunistic(ORDER, 9),
    ],
)
def test_only_a_ready_task_can_have_been_launched(make):
    with pytest.raises(KeyError):
        make().launched(t("0F0"))
