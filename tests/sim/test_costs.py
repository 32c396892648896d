"""Durations: constant tables and the seeded ways to disturb them."""

import math
import random
import statistics

import pytest

from rrfp_jax.core import graph, policies
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs, simulator
from rrfp_jax.sim.costs import InjectedJitter
from tests.core.instrument import t

CHAIN = graph.chain(4, (0, 1, 2))
LONG = graph.chain(20_000, (0, 1))


def durations(table, kind=Kind.F, stage=0):
    """Returns the seconds of one stage."""
    return table.compute[kind, stage]


def test_a_constant_table_prices_each_stage_and_each_transfer():
    table = costs.constant(CHAIN, [1.0, 2.0, 3.0], 4.0, 0.5)
    assert [table.compute_s(t(f"{s}F3")) for s in range(3)] == [1.0, 2.0, 3.0]
    assert table.compute_s(t("1B0")) == 4.0
    assert table.transfer_s(t("0F2"), to=1) == 0.5
    assert table.transfer_s(t("1B2"), to=0) == 0.5


def test_only_edges_between_ranks_have_a_transfer():
    """0 -> 1 stays on rank 0; the skip edge 0 -> 2 does not."""
    of = PipelineGraph(3, 1, ((0, 1), (1, 2), (0, 2)), (0, 0, 1))
    table = costs.constant(of, 1.0, 1.0, 1.0)
    assert sorted(table.transfer) == [
        (Kind.B, 2, 0),
        (Kind.B, 2, 1),
        (Kind.F, 0, 2),
        (Kind.F, 1, 2),
    ]


@pytest.mark.parametrize("kind", ["F", "B"])
def test_a_list_of_the_wrong_length_is_refused(kind):
    lists = ([1.0, 2.0], 1.0) if kind == "F" else (1.0, [1.0, 2.0])
    with pytest.raises(ConfigError, match=f"2 durations of {kind} for 3 stages"):
        costs.constant(CHAIN, *lists)


DISTURB = {
    "injected": lambda table, seed: costs.with_injected(
        table, costs.LEVELS["J3"], seed
    ),
    "lognormal": lambda table, seed: costs.with_lognormal(table, 0.5, seed),
    "transfers": lambda table, seed: costs.with_lognormal_transfers(table, 0.5, seed),
    "tails": lambda table, seed: costs.with_heavy_tailed_transfers(table, 1.0, seed),
    "images": lambda table, seed: costs.with_image_load(table, {0, 1}, 0.5, seed),
}


@pytest.mark.parametrize("name", DISTURB)
def test_a_seed_fixes_every_duration(name):
    table = costs.constant(CHAIN, 1.0, 2.0, 0.5)
    disturb = DISTURB[name]
    assert disturb(table, 7) == disturb(table, 7)
    assert disturb(table, 7) != disturb(table, 8)
    assert disturb(table, 7) != table


@pytest.mark.parametrize("name", DISTURB)
def test_disturbances_touch_compute_or_transfers_and_not_both(name):
    table = costs.constant(CHAIN, 1.0, 2.0, 0.5)
    found = DISTURB[name](table, 7)
    if name in ("transfers", "tails"):
        assert found.compute == table.compute
    else:
        assert found.transfer == table.transfer


def test_the_global_random_state_is_neither_read_nor_moved():
    table = costs.constant(CHAIN, 1.0, 2.0, 0.5)
    random.seed(1)
    before = random.getstate()
    first = [disturb(table, 7) for disturb in DISTURB.values()]
    assert random.getstate() == before
    random.seed(2)
    assert first == [disturb(table, 7) for disturb in DISTURB.values()]


def test_durations_do_not_depend_on_when_a_task_runs():
    """Two policies, one seed: other orders, yet each task takes the same time."""
    table = costs.with_lognormal(costs.constant(CHAIN, 1.0, 2.0, 0.5), 0.8, seed=3)
    runs = [
        simulator.simulate(CHAIN, Policy(hint=hint, order=mode), table)
        for hint, mode in (("bf", "readiness"), ("gpipe", "fixed"))
    ]
    assert runs[0].launches() != runs[1].launches()
    for run in runs:
        assert len(run.spans) == 24
        for span in run.spans:
            assert span.end_s - span.start_s == pytest.approx(
                table.compute_s(span.task)
            )


def test_the_levels_are_the_papers():
    """RRFP §7.6."""
    papers = {
        "J0": InjectedJitter(0.0, 0.0, 0.0),
        "J1": InjectedJitter(0.1, 0.005, 0.5),
        "J2": InjectedJitter(0.2, 0.010, 1.0),
        "J3": InjectedJitter(0.3, 0.015, 1.5),
    }
    assert papers == costs.LEVELS


def test_j0_injects_nothing():
    table = costs.constant(CHAIN, 1.0, 2.0)
    assert costs.with_injected(table, costs.LEVELS["J0"], seed=1) == table


@pytest.mark.parametrize(
    ("level", "compute_s", "unit_s"),
    [
        ("J1", 0.1, 0.5 * 0.1),  # above the base: alpha times the average
        ("J2", 0.001, 1.0 * 0.010),  # below it: alpha times the base
        ("J3", 0.1, 1.5 * 0.1),
        ("J3", 0.001, 1.5 * 0.015),
    ],
)
def test_a_sleep_follows_with_probability_p_and_lasts_half_to_one_and_a_half(
    level, compute_s, unit_s
):
    """alpha * max(base, e) * (0.5 + r); constant compute has a constant average."""
    jitter = costs.LEVELS[level]
    table = costs.with_injected(costs.constant(LONG, compute_s, 1.0), jitter, seed=0)
    sleeps = [s - compute_s for s in durations(table)]
    struck = [s / unit_s for s in sleeps if s > 1e-9]
    assert len(struck) / len(sleeps) == pytest.approx(jitter.probability, abs=0.01)
    assert min(struck) == pytest.approx(0.5, abs=0.01)
    assert max(struck) == pytest.approx(1.5, abs=0.01)
    assert statistics.mean(struck) == pytest.approx(1.0, abs=0.02)


def test_the_moving_average_takes_a_tenth_of_each_compute_time():
    """e = 0.9 e + 0.1 c: after 10, 10, ~0 it is 9; a sleep every time shows it."""
    of = graph.chain(3, (0,))
    given = costs.constant(of, 0.0, 0.0)
    table = costs.CostTable(
        given.compute | {(Kind.F, 0): (10.0, 10.0, 1e-9)}, given.transfer
    )
    draws = [
        costs.with_injected(table, InjectedJitter(1.0, 0.0, 1.0), s) for s in range(400)
    ]
    last = [durations(each)[2] for each in draws]  # 9 * (0.5 + r)
    assert min(last) == pytest.approx(4.5, abs=0.1)
    assert max(last) == pytest.approx(13.5, abs=0.1)
    assert statistics.mean(last) == pytest.approx(9.0, abs=0.4)


def test_kinds_and_stages_have_averages_of_their_own():
    """The backward is ten times longer, but no forward sleeps for that."""
    of = graph.chain(200, (0, 1))
    table = costs.constant(of, [1.0, 50.0], 10.0)
    slow = costs.with_injected(table, InjectedJitter(1.0, 0.0, 1.0), seed=0)
    assert max(durations(slow)) <= 1.0 + 1.5
    assert min(durations(slow, stage=1)) >= 50.0 + 25.0


@pytest.mark.parametrize("cv", [0.1, 0.5, 1.0])
def test_lognormal_compute_has_mean_one_and_the_asked_variation(cv):
    table = costs.with_lognormal(costs.constant(LONG, 2.0, 2.0, 0, 2.0), cv, seed=0)
    for kind in Kind:
        found = durations(table, kind)
        mean = statistics.mean(found)
        assert mean == pytest.approx(2.0, rel=0.03)
        assert statistics.pstdev(found) / mean == pytest.approx(cv, rel=0.08)


def test_lognormal_transfers_have_mean_one_and_the_asked_variation():
    of = costs.constant(LONG, 1.0, 1.0, 4.0)
    found = costs.with_lognormal_transfers(of, 0.5, seed=0).transfer[Kind.F, 0, 1]
    assert statistics.mean(found) == pytest.approx(4.0, rel=0.03)
    assert statistics.pstdev(found) / 4.0 == pytest.approx(0.5, rel=0.08)


def test_no_variation_is_no_change():
    table = costs.constant(CHAIN, 1.0, 2.0, 0.5)
    assert costs.with_lognormal(table, 0.0, seed=5) == table


@pytest.mark.parametrize("tail", [0.57, 1.0, 3.0])
def test_heavy_tails_keep_the_median_and_are_pareto(tail):
    """Median 1; the 95th percentile is that of a Pareto of this exponent."""
    table = costs.constant(LONG, 1.0, 1.0, 3.0)
    moved = costs.with_heavy_tailed_transfers(table, tail, seed=0).transfer[
        Kind.B, 1, 0
    ]
    found = sorted(s / 3.0 for s in moved)
    assert statistics.median(found) == pytest.approx(1.0, rel=0.04)
    p95 = found[len(found) * 95 // 100]
    assert math.log(p95) == pytest.approx(math.log(10) / tail, rel=0.05)


def test_the_papers_measured_spread_is_an_exponent_of_about_057():
    """RRFP §2: (p95 - p5) / p50 of communication up to 58.7."""
    p5, p50, p95 = (q ** (-1 / 0.57) for q in (0.95, 0.5, 0.05))
    assert (p95 - p5) / p50 == pytest.approx(58.74, rel=0.05)


def test_a_straggler_is_one_rank_with_all_its_stages():
    of = graph.chain(2, (0, 1, 0))
    table = costs.with_straggler(costs.constant(of, 1.0, 2.0), of, rank=0, factor=3.0)
    assert [table.compute_s(t(f"{s}F1")) for s in range(3)] == [3.0, 1.0, 3.0]
    assert [table.compute_s(t(f"{s}B1")) for s in range(3)] == [6.0, 2.0, 6.0]


def test_image_load_is_shared_by_all_vision_stages_forward_and_back():
    """One factor a microbatch: stages 0 and 1 see it in F and B, stage 2 does not."""
    table = costs.with_image_load(costs.constant(CHAIN, 1.0, 2.0), {0, 1}, 0.7, seed=4)
    load = durations(table)
    assert len(set(load)) == 4
    assert durations(table, stage=1) == load
    assert durations(table, Kind.B, 1) == tuple(2.0 * s for s in load)
    assert durations(table, stage=2) == (1.0,) * 4


def test_image_load_has_mean_one():
    table = costs.with_image_load(costs.constant(LONG, 1.0, 1.0), {0}, 0.7, seed=4)
    assert statistics.mean(durations(table)) == pytest.approx(1.0, rel=0.03)


def test_every_rule_faces_the_same_table():
    """Simulating changes nothing in it."""
    table = costs.with_lognormal(costs.constant(CHAIN, 1.0, 2.0), 0.5, seed=1)
    before = dict(table.compute)
    for rule in policies.RULES:
        simulator.simulate(CHAIN, Policy(hint=rule), table)
    assert table.compute == before
