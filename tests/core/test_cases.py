"""The cases of shared/cases/README.md that concern the core alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import graph, placement, policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs, machine, simulator
from tests.core import instrument, strategies

FOUR = placement.one_each(4)
V_ORDERS = ("zb_v", "v_half")
HINTS = tuple(h for h in policies.RULES + policies.ORDERS if h not in V_ORDERS)
PLACEMENTS = {
    "chain": graph.chain(6, FOUR),
    "interleaved": graph.chain(6, placement.interleaved(2, 3)),
    "v_shaped": graph.chain(6, placement.v_shaped(3)),
    "one_rank": graph.chain(6, (0, 0, 0)),
    "towers": PipelineGraph(
        5, 6, ((0, 1), (1, 3), (2, 3), (3, 4)), (0, 1, 1, 0, 2), frozenset({(2, 4)})
    ),
    "skip_edges": PipelineGraph(
        4, 6, ((0, 1), (1, 2), (2, 3), (0, 3), (0, 2)), (0, 1, 0, 1)
    ),
}


def watched(of, policy):
    """Returns the policy's dispatchers under the instrument."""
    admits = strategies.ADMITS[policy.back_pressure]
    if policy.order != "readiness":
        admits = instrument.unbounded
    return [
        instrument.Watched(
            each, of, policy.in_flight_limit, admits, policy.launch_ahead
        )
        for each in policies.dispatchers(of, policy)
    ]


def peaks(of, policy, seed=0):
    """Runs a step under the instrument and returns the peak in flight of each rank."""
    of = policy.applied_to(of)
    table = strategies.random_costs(of, seed)
    trace = simulator.drive(watched(of, policy), machine.Overlapped(of, table))
    return trace.peak_in_flight()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("hint", HINTS)
@pytest.mark.parametrize("limit", [1, 3, 32])
def test_c01_few_microbatches_finish_under_every_hint(count, hint, limit):
    of = graph.chain(count, FOUR)
    for seed in range(3):
        policy = Policy(hint=hint, in_flight_limit=limit)
        assert max(peaks(of, policy, seed)) <= min(count, limit)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("hint", HINTS)
def test_c01_few_microbatches_finish_under_every_fixed_order(count, hint):
    of = graph.chain(count, FOUR)
    policy = Policy(hint=hint, order="fixed")
    trace = simulator.simulate(of, policy, strategies.random_costs(of, 1))
    assert len(trace.spans) == (12 if policy.is_split else 8) * count
    depths = {
        "gpipe": [count] * 4,
        "deep_1f1b": [8, 6, 4, 2],
        "eager_1f1b": [8, 6, 4, 2],
        "zb_h1": [4] * 4,
        "zb_h2": [7] * 4,
    }.get(hint, [4, 3, 2, 1])
    expected = [min(count, d) for d in depths]
    assert trace.peak_in_flight() == expected


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 20])
@pytest.mark.parametrize("hint", V_ORDERS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_c01_any_m_finishes_in_the_orders_for_a_v(count, hint, num_ranks):
    of = graph.chain(count, placement.v_shaped(num_ranks))
    for mode in ("fixed", "readiness"):
        policy = Policy(hint=hint, order=mode)
        trace = simulator.simulate(of, policy, strategies.random_costs(of, 1))
        assert len(trace.spans) == 6 * num_ranks * count


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("rule", policies.RULES)
def test_c02_any_m_runs_interleaved_under_every_rule(count, rule):
    """2 ranks x 2 chunks; no divisibility where readiness decides."""
    of = graph.chain(count, placement.interleaved(2, 2))
    for limit in (1, 2, 32):
        policy = Policy(hint=rule, in_flight_limit=limit)
        assert max(peaks(of, policy)) <= min(count, limit)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_c02_a_fixed_order_that_cannot_says_so_before_the_step(count):
    of = graph.chain(count, placement.interleaved(2, 2))
    with pytest.raises(
        ConfigError, match=f"{count} microbatches on 2 ranks x 2 chunks"
    ):
        policies.dispatchers(of, Policy(hint="1f1b", order="fixed"))


@pytest.mark.parametrize("rule", policies.RULES)
@pytest.mark.parametrize("pressure", policies.PRESSURES)
def test_c21_a_slow_last_stage_does_not_fill_the_first(rule, pressure):
    """Last stage 100 x slower, M = 64, limit 6: stage 0 holds 6, and does reach 6.

    The paper's rule counts forwards less backwards: weight gradients that wait are none
    of its business, and another limit's.
    """
    of = graph.chain(64, FOUR)
    table = costs.constant(of, [1.0, 1.0, 1.0, 100.0], [1.0, 1.0, 1.0, 100.0])
    policy = Policy(hint=rule, in_flight_limit=6, back_pressure=pressure)
    peak = simulator.simulate(of, policy, table).peak_in_flight()[0]
    if pressure == "one_by_one" and policy.is_split:
        assert 6 <= peak <= 6 + 2
    else:
        assert peak == 6


def test_c21_without_a_limit_it_would():
    """The control: the same step with limit 64 fills stage 0 with all of them."""
    of = graph.chain(64, FOUR)
    table = costs.constant(of, [1.0, 1.0, 1.0, 100.0], [1.0, 1.0, 1.0, 100.0])
    trace = simulator.simulate(of, Policy(in_flight_limit=64), table)
    assert trace.peak_in_flight()[0] == 64


@pytest.mark.parametrize("name", PLACEMENTS)
@pytest.mark.parametrize("rule", policies.RULES)
@pytest.mark.parametrize("pressure", policies.PRESSURES)
@pytest.mark.parametrize("launch_ahead", [1, 2])
def test_c22_limit_one_finishes_everywhere(name, rule, pressure, launch_ahead):
    """Chains, interleaved and V placements, DAGs."""
    of = PLACEMENTS[name]
    policy = Policy(
        rule,
        in_flight_limit=1,
        weight_limit=launch_ahead - 1,
        back_pressure=pressure,
        launch_ahead=launch_ahead,
    )
    for seed in range(5):
        found = peaks(of, policy, seed)
        if pressure == "reserving":
            assert found == [1] * of.num_ranks


def test_c22_limit_zero_is_a_config_error():
    with pytest.raises(ConfigError, match="in_flight_limit=0"):
        Policy(in_flight_limit=0)


@given(strategies.graphs(), st.sampled_from(policies.MODES), st.integers(0, 99))
@settings(derandomize=True, deadline=None)
def test_gpipe_finishes_in_every_mode_on_every_pipeline(of, mode, seed):
    """As hint, as fixed order and opportunistically (a limit that does not bind)."""
    policy = Policy(hint="gpipe", order=mode, in_flight_limit=100)
    table = strategies.random_costs(of, seed)
    ran = simulator.simulate(of, policy, table)
    assert len(ran.spans) == len(policy.applied_to(of).tasks())


def test_the_instrument_sees_a_fixed_order_wait():
    """Seen to fail: 1F1B leaves work beside a free rank, and is caught."""
    of = graph.chain(6, FOUR)
    with pytest.raises(AssertionError, match="is free and leaves"):
        peaks(of, Policy(hint="1f1b", order="fixed"))
