"""What a trace tells of steps that were not run."""

import collections
import dataclasses
import math
import random
import statistics

import pytest

from rrfp_jax.core import placement, trace_parts
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import (
    costs,
    fit,
    fit_cut,
    fit_draws,
    fit_host,
    fit_variation,
    simulator,
)
from rrfp_jax.sim.fit_draws import Settings
from rrfp_jax.sim.machine import Blocking, Overlapped
from tests.core.instrument import t
from tests.sim.traced import (
    BF,
    BFW,
    DAG,
    FIXED,
    ONE_EACH,
    chain,
    constant,
    disturbed,
    fitted_on,
    predicted,
    ran,
)


def test_the_pool_has_what_every_traced_microbatch_took_and_kept():
    trace = ran(chain(), BFW, disturbed(chain(), 3), latency_s=1e-3)
    table = disturbed(chain(), 3)
    for j, found in enumerate(fitted_on(trace).pool):
        assert found.compute == pytest.approx(
            {node: each[j] for node, each in table.compute.items()}
        )
        assert found.transfer == pytest.approx(
            {link: each[j] for link, each in table.transfer.items()}
        )
        assert found.kept[Kind.F, 2] == 1000
        assert found.kept[Kind.B, 2] == 500


def test_the_draws_hold_each_traced_microbatch_equally_often():
    fitted = fitted_on(*(ran(chain(), BFW, disturbed(chain(), s)) for s in range(3)))
    drawn = fit_draws.draws(fitted, Settings(num_draws=6))
    assert [len(draw.chosen) for draw in drawn] == [8] * 6
    counts = collections.Counter(id(each) for draw in drawn for each in draw.chosen)
    assert sorted(counts.values()) == [2] * 24
    drawn = fit_draws.draws(fitted, Settings(num_draws=5))
    counts = collections.Counter(id(each) for draw in drawn for each in draw.chosen)
    assert sorted(counts.values()) == [1] * 8 + [2] * 16


def test_the_same_seed_predicts_the_same_and_another_does_not():
    fitted = fitted_on(ran(chain(), BFW, disturbed(chain(), 0)))
    first, again, other = (predicted(fitted, BF, seed=s).step_s for s in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("traced", [BFW, Policy("bf", split="always")])
@pytest.mark.parametrize("policy", [BF, BFW, FIXED, Policy("zb_h1", launch_ahead=2)])
def test_without_variation_other_policies_are_predicted_exactly(traced, policy):
    fitted = fitted_on(ran(chain(), traced, constant(chain())))
    table = constant(chain())
    expected = simulator.simulate(chain(), policy, table).makespan_s
    assert predicted(fitted, policy).step_s == pytest.approx([expected] * 20)


@pytest.mark.parametrize("name", ["v_shaped", "interleaved"])
def test_other_placements_run_halves_of_the_stages(name):
    """Task by task: halves are as long as each other, so the order of a rank may hang
    on how a tie is rounded."""
    fitted = fitted_on(ran(chain(), BFW, constant(chain())))
    cut = {cut.name: cut for cut in fit_cut.cuts(fitted)}[name]
    assert "cut in half" in cut.note
    (draw,) = fit_draws.draws(fitted, Settings(num_draws=1))
    trace = draw.run(cut, BFW)
    assert trace.graph == BFW.applied_to(chain(cut.placement))
    table = constant(trace.graph)
    for span in trace.spans:
        lasted_s = span.end_s - span.start_s
        assert lasted_s == pytest.approx(table.compute_s(span.task))
    assert len(trace.transfers) == 8 * 2 * (7 - (name == "v_shaped"))
    for move in trace.transfers:
        assert move.end_s - move.start_s == pytest.approx(0.0020411)
    assert set(trace.residuals.num_bytes[Kind.F, 3]) == {500}
    assert set(trace.residuals.num_bytes[Kind.B, 3]) == {250}


def test_two_stages_a_rank_are_put_together_or_moved():
    two = chain(placement.v_shaped(4))
    fitted = fitted_on(ran(two, BFW, constant(two)))
    names = [cut.name for cut in fit_cut.cuts(fitted)]
    assert names == ["v_shaped", "interleaved", "one_each"]
    for at, where in ((1, placement.interleaved(4, 2)), (2, ONE_EACH)):
        graph = chain(where)
        expected = simulator.simulate(graph, BFW, constant(graph)).makespan_s
        assert predicted(fitted, BFW, cut=at).mean_s == pytest.approx(expected)


def test_a_placement_of_its_own_is_only_predicted_as_it_is():
    graph = chain((0, 0, 1))
    table = costs.constant(graph, 0.01, 0.02, 0.001)
    (cut,) = fit_cut.cuts(fitted_on(ran(graph, BF, table)))
    assert (cut.name, cut.placement, cut.note) == ("", (0, 0, 1), "")


@pytest.mark.parametrize("traced", [BF, BFW])
@pytest.mark.parametrize("policy", [BF, BFW])
def test_skipped_and_frozen_stages_stay_what_they_are(traced, policy):
    fitted = fitted_on(ran(DAG, traced, disturbed(DAG, 1)))
    for cut in fit_cut.cuts(fitted):
        share = len(cut.placement) // 4
        for draw in fit_draws.draws(fitted, Settings(num_draws=3)):
            trace = draw.run(cut, policy)
            graph = trace.graph
            assert graph.frozen == {s for s in range(4 * share) if s // share == 0}
            for j, each in enumerate(draw.chosen):
                skips = {s // share for s, k in graph.skipped if k == j}
                assert skips == each.skipped
            assert {span.task for span in trace.spans} == set(graph.tasks())
            assert all(span.end_s > span.start_s for span in trace.spans)


def test_a_frozen_stage_has_no_weight_gradient_in_its_backward():
    """Stage 1 passes on the cotangents that stage 0 needs, and that is all it does."""
    graph = dataclasses.replace(chain((0, 1, 2)), frozen=frozenset({1}))
    table = costs.constant(graph, 0.01, 0.02, 0.001, [0.03, 0.0, 0.03])
    fitted = fitted_on(ran(graph, BF, table))
    (draw,) = fit_draws.draws(fitted, Settings(num_draws=1))
    cut = fit_cut.cuts(fitted)[0]
    lasted = {s.task: s.end_s - s.start_s for s in draw.run(cut, BFW).spans}
    assert lasted[t("1B0")] == pytest.approx(0.02)
    assert t("1W0") not in lasted
    assert lasted[t("0B0")] + lasted[t("0W0")] == pytest.approx(0.05)


def test_each_half_of_a_dag_keeps_its_edges():
    fitted = fitted_on(ran(DAG, BFW, disturbed(DAG, 1)))
    halved = fit_cut.cuts(fitted)[1]
    inside = {(2 * s, 2 * s + 1) for s in range(4)}
    assert set(halved.edges) - inside == {(1, 4), (3, 4), (5, 6)}


def test_a_load_that_stages_share_is_kept_together():
    """Were the load the chance of each task, it would average out, and steps would seem
    shorter. (On the durations of the traced steps, so that it is not their sampling
    that is measured.)"""
    graph = chain(count=24)
    shallow = dataclasses.replace(BFW, in_flight_limit=4)
    tables = [disturbed(graph, seed, image_cv=0.8) for seed in range(24)]
    fitted = fitted_on(*(ran(graph, Policy("bf", split="always"), t) for t in tables))
    expected_s = statistics.fmean(ran(graph, shallow, t).makespan_s for t in tables)
    together_s = predicted(fitted, shallow, num_draws=100).mean_s
    assert together_s == pytest.approx(expected_s, rel=0.01)
    random_ = random.Random(0)
    nodes = list(fitted.pool[0].compute)
    columns = {
        node: random_.sample([m.compute[node] for m in fitted.pool], len(fitted.pool))
        for node in nodes
    }
    apart = dataclasses.replace(
        fitted,
        pool=tuple(
            dataclasses.replace(m, compute={node: columns[node][i] for node in nodes})
            for i, m in enumerate(fitted.pool)
        ),
    )
    apart_s = predicted(apart, shallow, num_draws=100).mean_s
    assert apart_s < 0.98 * expected_s


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("latency_s", [0.0, 3e-4])
def test_the_latency_of_the_host_is_found(ahead, latency_s):
    policy = Policy("bfw", launch_ahead=ahead)
    trace = ran(chain(), policy, disturbed(chain(), 5), latency_s)
    assert fitted_on(trace).latency_s == pytest.approx(latency_s, abs=1e-9)


@pytest.mark.parametrize("kind", [Overlapped, Blocking])
def test_a_late_machine_tells_when_it_said_it_would(kind):
    graph = chain((0, 1), count=1)
    table = costs.constant(graph, 0.1, 0.2, 0.7)
    machine = fit_host.Late(kind(graph, table), 0.3)
    machine.launch(t("0F0"), 0.0)
    machine.send(t("0F0"), 1, 0.0)
    told = []
    while (due_s := machine.next_due_s()) is not None:
        assert machine.pop(due_s - 1e-6) is None
        event = machine.pop(due_s)
        told += [event] if event else []  # what is due may be known to machines only
    assert [each.time_s for each in told] == pytest.approx(
        [0.4, 1.1] if kind is Overlapped else [1.1, 1.1]
    )
    assert machine.pop(math.inf) is None


def test_a_late_host_costs_less_where_it_launches_ahead():
    graph = chain()
    steps = {}
    for latency_s in (0.0, 1e-3):
        fitted = fitted_on(ran(graph, BFW, constant(graph), latency_s))
        for ahead in (1, 2):
            policy = dataclasses.replace(BF, launch_ahead=ahead)
            steps[latency_s, ahead] = predicted(fitted, policy, num_draws=1).mean_s
    lost = [steps[1e-3, ahead] - steps[0.0, ahead] for ahead in (1, 2)]
    assert lost[0] > 16e-3  # the slowest rank waits before each of its tasks
    assert lost[1] < lost[0] / 2


def test_a_whole_backward_is_split_by_a_guess_that_widens_the_interval():
    table = costs.constant(chain(), 0.0100331, 0.0100331, 0.0020411, 0.0100331)
    fitted = fitted_on(ran(chain(), BF, table))
    low, high = predicted(fitted, BF).interval_s
    assert high == pytest.approx(low)
    cut = fit_cut.cuts(fitted)[0]
    parts = set()
    for draw in fit_draws.draws(fitted, Settings(weight_fraction=0.4)):
        both = {
            span.task: span.end_s - span.start_s for span in draw.run(cut, BFW).spans
        }
        (part,) = {round(both[t(f"{s}W3")] / 0.0200662, 9) for s in range(4)}
        assert both[t("1B3")] + both[t("1W3")] == pytest.approx(0.0200662)
        parts.add(part)
    assert len(parts) == 20
    assert 0.3 <= min(parts) < 0.33
    assert 0.47 < max(parts) <= 0.5
    shallow = dataclasses.replace(BFW, in_flight_limit=2)  # so that B is waited for
    guessed = predicted(fitted, shallow)
    low, high = guessed.interval_s
    expected = simulator.simulate(chain(), shallow, table).makespan_s
    assert low <= expected * (1 + 1e-9)
    assert expected <= high * (1 + 1e-9)
    assert high > 1.01 * low
    # All that F kept counts for W: no one knows what it needs.
    exact = fitted_on(ran(chain(), BFW, table))
    assert guessed.peak_bytes >= predicted(exact, shallow).peak_bytes


def test_the_parts_of_processes_make_a_step():
    whole = ran(chain(), BFW, disturbed(chain(), 2), 1e-4)
    parts = []
    for ranks in ((0, 1), (2, 3)):
        part = Trace(whole.graph, whole.residuals)
        trace_parts.complete(part, [trace_parts.pack(whole, ranks)])
        parts.append(part)
    together, alone = fitted_on(*parts, *parts), fitted_on(whole, whole)
    assert together.pool == alone.pool
    assert together.latency_s == pytest.approx(alone.latency_s)
    with pytest.raises(ConfigError, match=r"step 0: .* 48 of its tasks are missing"):
        fitted_on(parts[0])
    with pytest.raises(ConfigError, match="not the parts of one step"):
        fitted_on(parts[0], parts[0], parts[1])


def test_no_trace_and_traces_of_different_pipelines_are_refused():
    with pytest.raises(ConfigError, match="no trace to fit"):
        fit.fit({})
    table = constant(chain())
    with pytest.raises(ConfigError, match="is_split is False, and True"):
        fitted_on(ran(chain(), BF, table), ran(chain(), BFW, table))
    more = chain(count=9)
    with pytest.raises(ConfigError, match="step 0 and step 1 are of different"):
        fitted_on(ran(chain(), BF, table), ran(more, BF, constant(more)))


def test_a_load_and_who_feels_it_are_found():
    graph = chain(count=64)
    fitted = fitted_on(ran(graph, BFW, disturbed(graph, 4, image_cv=0.5)))
    stages, loads = fit_variation.variation(fitted)
    (load,) = loads
    assert load.stages == (0, 1)
    assert load.cv == pytest.approx(0.5, rel=0.25)
    assert all(each.own_cv < 0.15 for each in stages)  # 0.1 / sqrt(3) of three tasks
    calm = fitted_on(ran(graph, BFW, disturbed(graph, 4, image_cv=0.0)))
    assert fit_variation.variation(calm)[1] == []
