"""Names in a config become arbiters, or an error with a remedy."""

import pytest

from rrfp_jax.core import events, graph, orders, placement, policies
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs, simulator
from tests.core.instrument import launches, t, ts

CHAIN = graph.chain(8, (0, 1, 2, 3))


def ran(policy, of=CHAIN):
    """Simulates one step with B twice as long as F."""
    return simulator.simulate(of, policy, costs.constant(of, 1.0, 2.0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hint": "zigzag"}, "pipeline.hint='zigzag' is not known.*v_half, or the"),
        ({"order": "gpipe"}, "pipeline.order='gpipe' is not known.*readiness, fixed"),
        ({"order": "x.csv"}, "pipeline.order='x.csv' is not known"),
        ({"back_pressure": "none"}, "pipeline.back_pressure='none' is not known"),
        ({"in_flight_limit": 0}, "pipeline.in_flight_limit=0 lets no microbatch"),
        ({"launch_ahead": 0}, "pipeline.launch_ahead=0 launches nothing"),
        ({"split": "never"}, "pipeline.split='never' is not known.*as_needed, always"),
        ({"weight_limit": -1}, "pipeline.weight_limit=-1 is negative"),
        ({"memory_limit_gb": -0.5}, "pipeline.memory_limit_gb=-0.5 is negative"),
        ({"memory_limit_gb": float("nan")}, "pipeline.memory_limit_gb=nan is neg"),
        ({"in_flight_taper": -1.0}, "pipeline.in_flight_taper=-1.0 is negative"),
        ({"microbatch_group": -2}, "pipeline.microbatch_group=-2 is negative"),
    ],
)
def test_an_unknown_value_is_refused_with_the_legal_ones(changes, message):
    with pytest.raises(ConfigError, match=f"(?s){message}") as caught:
        Policy(**changes)
    assert "\n  Set --config.pipeline." in str(caught.value)


def test_the_defaults_are_the_papers_with_two_launches_ahead():
    """RRFP §5: BF, limit 32; architecture.md §3: launch-ahead 2."""
    assert Policy() == Policy(
        hint="bf", order="readiness", in_flight_limit=32, launch_ahead=2
    )
    assert not Policy().is_split


def test_what_needs_weight_gradients_as_tasks_splits_the_backward():
    split = [h for h in policies.RULES + policies.ORDERS if Policy(h).is_split]
    assert split == ["bfw", "bfw_memory", "zb_h1", "zb_h2", "zb_v", "v_half"]
    assert Policy("bf", deterministic=True).is_split
    assert Policy("bf", split="always").is_split
    assert Policy("bf", deterministic=True).applied_to(CHAIN).in_order


def test_the_limit_tapers_towards_the_loss_and_never_below_one():
    table = costs.constant(CHAIN, [1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 9.0])
    policy = Policy("f_priority", in_flight_limit=5, in_flight_taper=2.5)
    peaks = simulator.simulate(CHAIN, policy, table).peak_in_flight()
    assert peaks == [5, 2, 1, 1]


@pytest.mark.parametrize(
    "hint", ["gpipe", "1f1b", "deep_1f1b", "eager_1f1b", "zb_h1", "zb_h2"]
)
def test_a_fixed_order_launches_exactly_its_order(hint):
    policy = Policy(hint=hint, order="fixed")
    expected = policies.fixed_orders(policy.applied_to(CHAIN), policy)
    assert [tuple(each) for each in ran(policy).launches()] == expected


@pytest.mark.parametrize("rule", policies.RULES)
def test_fixed_under_a_rule_is_1f1b(rule):
    policy = Policy(hint=rule, order="fixed")
    expected = orders.one_forward_one_backward(CHAIN)
    assert policies.fixed_orders(CHAIN, policy) == expected


def test_the_warm_up_factor_reaches_deep_1f1b_only():
    deep = policies.fixed_orders(CHAIN, Policy(hint="deep_1f1b", warmup_factor=1.5))
    assert deep == orders.one_forward_one_backward(CHAIN, 1.5)
    plain = policies.fixed_orders(CHAIN, Policy(hint="1f1b", warmup_factor=1.5))
    assert plain == orders.one_forward_one_backward(CHAIN)


def test_a_csv_is_a_fixed_order_and_a_hint(tmp_path):
    """Here the backward order is reversed, which only a CSV can say."""
    of = graph.chain(2, (0,))
    path = tmp_path / "reversed.csv"
    path.write_text("0F0,0F1,0B1,0B0\n")
    for mode in ("fixed", "readiness"):
        trace = ran(Policy(hint=str(path), order=mode), of)
        assert [str(a) for a in trace.launches()[0]] == ["0F0", "0F1", "0B1", "0B0"]


def test_a_csv_that_is_not_there_is_the_users_to_fix(tmp_path):
    with pytest.raises(ConfigError, match=r"missing.csv cannot be read") as caught:
        ran(Policy(hint=str(tmp_path / "missing.csv")))
    assert "--config.pipeline.hint" in str(caught.value)


def test_a_csv_that_is_no_text_is_the_users_to_fix(tmp_path):
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(ConfigError, match=r"binary.csv cannot be read"):
        ran(Policy(hint=str(path)))


def test_a_fixed_order_deeper_than_the_limit_is_refused():
    with pytest.raises(ConfigError) as caught:
        ran(Policy(hint="1f1b", order="fixed", in_flight_limit=3))
    text = str(caught.value)
    assert "fixed order 1f1b holds 4 microbatches in flight, more than" in text
    assert "pipeline.in_flight_limit=3" in text
    assert "Set --config.pipeline.in_flight_limit to 4 or more" in text
    ran(Policy(hint="1f1b", order="fixed", in_flight_limit=4))


def test_a_fixed_order_that_cannot_finish_is_refused_before_the_step(tmp_path):
    path = tmp_path / "crossed.csv"
    path.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    of = graph.chain(2, (0, 1))
    with pytest.raises(ConfigError, match="its ranks wait for each other"):
        ran(Policy(hint=str(path), order="fixed"), of)
    ran(Policy(hint=str(path)), of)  # as a hint it cannot do harm


def test_opportunistic_keeps_the_limit_or_is_refused():
    try:
        trace = ran(Policy(hint="1f1b", order="opportunistic", in_flight_limit=1))
    except ConfigError:
        return
    assert max(trace.peak_in_flight()) <= 1


def test_the_error_of_a_deep_order_names_the_order():
    with pytest.raises(ConfigError, match="fixed order 1f1b"):
        ran(Policy(hint="bf", order="fixed", in_flight_limit=3))


def test_a_limit_of_m_is_enough_for_every_fixed_order():
    of = graph.chain(4, placement.interleaved(2, 2))
    trace = ran(Policy(hint="1f1b", order="fixed", in_flight_limit=4), of)
    assert max(trace.peak_in_flight()) <= 4


def test_opportunistic_pulls_forwards_ahead_where_1f1b_waits():
    """Gradients are slow to travel: Varuna is deeper than 1F1B, and faster."""
    of = graph.chain(8, (0, 1, 2, 3))
    table = costs.constant(of, 1.0, 2.0, transfer_s=3.0)
    fixed = simulator.simulate(of, Policy(hint="1f1b", order="fixed"), table)
    varuna = simulator.simulate(
        of, Policy(hint="1f1b", order="opportunistic", in_flight_limit=6), table
    )
    assert fixed.peak_in_flight() == [4, 3, 2, 1]
    assert max(varuna.peak_in_flight()) == 6
    assert varuna.makespan_s < fixed.makespan_s


def test_launch_ahead_reaches_every_dispatcher():
    of = graph.chain(8, (0, 1))
    for ahead in (1, 2, 5):
        first = policies.dispatchers(of, Policy(launch_ahead=ahead))[0]
        assert len(launches(first.handle(events.Started()))) == ahead


def test_dispatchers_are_fresh_for_each_step():
    """A second step starts from nothing."""
    for _ in range(2):
        first = policies.dispatchers(CHAIN, Policy(launch_ahead=1))[0]
        assert launches(first.handle(events.Started())) == [t("0F0")]


@pytest.mark.parametrize(("name", "then"), [("reserving", "2F1"), ("one_by_one", "")])
def test_back_pressure_is_the_one_that_was_named(name, then):
    """At the limit of 2 with 2F1 here: the paper's strict order waits for 2F0."""
    of = graph.chain(4, placement.interleaved(2, 2))
    policy = Policy(in_flight_limit=2, back_pressure=name, launch_ahead=4)
    first = policies.dispatchers(of, policy)[0]
    assert launches(first.handle(events.Started())) == ts("0F0 0F1")
    assert launches(first.handle(events.Arrived(t("1F1"), to=2))) == ts(then)
