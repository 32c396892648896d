"""The simulator drives dispatchers to the end, or says who waits for what."""

import gc
import random

import pytest

from rrfp_jax.core import arbiters, graph, policies
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError, StallError
from rrfp_jax.sim import costs, machine, simulator
from tests.core.instrument import ts

CHAIN = graph.chain(4, (0, 1))
TABLE = costs.constant(CHAIN, 1.0, 2.0, 0.5)


def crossed():
    """Returns dispatchers whose fixed orders wait for each other."""
    orders = "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"
    of = graph.chain(2, (0, 1))
    return of, [
        Dispatcher(of, rank, arbiters.FixedOrder(ts(order)))
        for rank, order in enumerate(orders)
    ]


@pytest.mark.parametrize("make", [machine.Overlapped, machine.Blocking])
def test_a_stall_names_every_rank_and_what_it_waits_for(make):
    of, dispatchers = crossed()
    with pytest.raises(StallError) as caught:
        simulator.drive(dispatchers, make(of, costs.constant(of, 1.0, 1.0)))
    assert str(caught.value).splitlines() == [
        "rank 0 has 3 tasks left; none running or in transit.",
        "  0F1 held by the order, which waits for 0B0",
        "  0B0 misses 1B0",
        "  0B1 misses 1B1 0F1",
        "rank 1 has 3 tasks left; none running or in transit.",
        "  1B0 held by the order, which waits for 1F1",
        "  1F1 misses 0F1",
        "  1B1 misses 1F1",
    ]


def test_a_finish_that_never_came_is_named():
    """The device lost the last task: nothing to launch, yet the step is not done."""
    of = graph.chain(1, (0,))

    class Deaf(machine.Overlapped):
        def pop(self, until_s):
            told = super().pop(until_s)
            return None if told is None or told.event.task == ts("0B0")[0] else told

    deaf = Deaf(of, costs.constant(of, 1.0, 1.0))
    with pytest.raises(StallError, match="0B0"):
        simulator.drive(policies.dispatchers(of, Policy()), deaf)


def test_a_policy_that_does_not_fit_is_refused_before_time_begins():
    with pytest.raises(ConfigError, match="holds 4 microbatches in flight"):
        simulator.simulate(
            CHAIN, Policy(hint="gpipe", order="fixed", in_flight_limit=3), TABLE
        )


def test_blocking_links_are_chosen_by_a_flag():
    """The same step: transfers cost the ranks time only where they block."""
    free = simulator.simulate(CHAIN, Policy(), TABLE)
    blocked = simulator.simulate(CHAIN, Policy(), TABLE, blocking=True)
    assert free.makespan_s < blocked.makespan_s
    assert len(free.spans) == len(blocked.spans) == 16


def test_the_cycle_collector_is_left_as_it_was():
    """Also where the step fails."""
    for was_enabled in (True, False):
        (gc.enable if was_enabled else gc.disable)()
        try:
            simulator.simulate(CHAIN, Policy(), TABLE)
            assert gc.isenabled() == was_enabled
            of, dispatchers = crossed()
            with pytest.raises(StallError):
                simulator.drive(
                    dispatchers, machine.Overlapped(of, costs.constant(of, 1.0, 1.0))
                )
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()


def test_the_log_is_in_the_order_of_time():
    table = costs.with_lognormal(TABLE, 0.8, seed=2)
    for blocking in (False, True):
        trace = simulator.simulate(CHAIN, Policy(), table, blocking)
        times = [told.time_s for told in trace.log]
        assert times == sorted(times)
        assert times[-1] == max(trace.makespan_s, times[-1])


def test_readiness_beats_the_fixed_order_when_a_stage_is_late():
    """The point of it all, on 20 seeds: BF at depth M against 1F1B, jittered."""
    of = graph.chain(16, (0, 1, 2, 3))
    fixed = ready = 0.0
    for seed in range(20):
        table = costs.with_lognormal(costs.constant(of, 1.0, 2.0), 0.7, seed)
        fixed += simulator.simulate(
            of, Policy(hint="1f1b", order="fixed"), table
        ).makespan_s
        ready += simulator.simulate(of, Policy(launch_ahead=1), table).makespan_s
    assert ready < 0.97 * fixed


def test_a_long_step_is_simulated_to_its_end():
    """16 stages, 256 microbatches: 8,192 tasks, each once."""
    of = graph.chain(256, tuple(range(16)))
    table = costs.with_lognormal(costs.constant(of, 1.0, 2.0, 0.1), 0.5, seed=1)
    trace = simulator.simulate(of, Policy(), table)
    assert len({span.task for span in trace.spans}) == len(trace.spans) == 8192
    assert max(trace.peak_in_flight()) <= 32


def test_shuffling_the_ranks_in_the_table_changes_nothing():
    """A table is looked up by task, never read in order."""
    items = list(TABLE.compute.items())
    random.Random(0).shuffle(items)
    other = costs.CostTable(dict(items), TABLE.transfer)
    assert simulator.simulate(CHAIN, Policy(), other) == simulator.simulate(
        CHAIN, Policy(), TABLE
    )
