"""Dry runs: times without devices, and where an order is stuck."""

import pytest

from rrfp_jax.core import dry_run, graph, memory, orders, placement
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs, simulator
from tests.core.instrument import t, ts

PAIR = graph.chain(2, (0, 1))


def test_a_dry_run_times_every_task():
    """Rank 1 waits for the transfer; rank 0 for the way back."""
    order = orders.one_forward_one_backward(PAIR)
    found = dry_run.dry_run(order, PAIR, lambda task: 1.0, transfer_s=0.5)
    assert found.is_finished
    ends = {str(span.task): span.end_s for span in found.trace.spans}
    assert ends == {
        "0F0": 1.0,
        "0F1": 2.0,
        "1F0": 2.5,
        "1B0": 3.5,
        "0B0": 5.0,
        "1F1": 4.5,
        "1B1": 5.5,
        "0B1": 7.0,
    }


def test_by_default_a_whole_backward_takes_as_long_as_b_and_w():
    for is_split in (False, True):
        of = graph.chain(3, placement.v_shaped(2), is_split)
        seconds = dry_run.unit_s(of)
        kinds = (Kind.B, Kind.W) if is_split else (Kind.B,)
        assert sum(seconds(t(f"0{kind}0")) for kind in kinds) == 1.0
        assert seconds(t("0F0")) == 0.5


@pytest.mark.parametrize("hint", ["1f1b", "eager_1f1b", "gpipe"])
def test_it_agrees_with_the_simulator_where_links_are_free(hint):
    of = graph.chain(8, (0, 1, 2, 3))
    policy = Policy(hint, "fixed")
    simulated = simulator.simulate(of, policy, costs.constant(of, 1.0, 2.0, 0.25))
    found = dry_run.dry_run(simulated.launches(), of, transfer_s=0.25)
    assert found.trace.makespan_s == simulated.makespan_s


def test_it_knows_the_peak_memory_of_an_order():
    kept = memory.constant(PAIR, 10)
    order = orders.gpipe(PAIR)
    found = dry_run.dry_run(order, PAIR, residuals=kept)
    assert found.trace.peak_bytes() == [20, 20]


def test_an_order_that_cannot_finish_is_shown_with_its_faults():
    """Rank 0 wants its backward before the forward that rank 1 waits for."""
    crossed = [tuple(ts("0F0 0B0 0F1 0B1")), tuple(ts("1F0 1F1 1B0 1B1"))]
    found = dry_run.dry_run(crossed, PAIR)
    assert not found.is_finished
    assert found.stuck == (t("0B0"), t("1F1"))
    first, second = str(found).splitlines()
    assert first.startswith("rank  0 |F0")
    assert first.index("!0B0") < second.index("!1F1")  # marked when it got stuck
    assert first.endswith("  misses 1B0")
    assert second.endswith("  misses 0F1")
    with pytest.raises(ConfigError, match=r"(?s)cannot finish.*!0B0.*!1F1"):
        dry_run.check_finishes(crossed, PAIR)


def test_a_rank_that_finishes_beside_a_stuck_one_has_no_mark():
    of = graph.PipelineGraph(3, 1, ((0, 2), (1, 2)), (0, 1, 2), frozen=frozenset({0}))
    stuck = [tuple(ts("0F0")), tuple(ts("1B0 1F0")), tuple(ts("2F0 2B0"))]
    lines = str(dry_run.dry_run(stuck, of)).splitlines()
    assert "!" not in lines[0]
    assert "!1B0" in lines[1]
    assert lines[1].endswith("misses 1F0 2B0")
    assert "!2F0" in lines[2]


def test_nothing_at_all_can_run():
    lines = str(dry_run.dry_run([tuple(ts("0B0 0F0"))], graph.chain(1, (0,))))
    assert "|!0B0" in lines
