"""Orders for a split backward, against what their papers say of them."""

import pytest

from rrfp_jax.core import dry_run, graph, memory, placement, policies, zero_bubble
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.policies import Policy
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from tests.core.instrument import ts

RANKS = [2, 3, 4, 8, 16]
V = placement.v_shaped


def chain(num_ranks, count=None):
    return graph.chain(count or 3 * num_ranks, tuple(range(num_ranks)), is_split=True)


def v_chain(num_ranks, count=None):
    return graph.chain(count or 3 * num_ranks, V(num_ranks), is_split=True)


def ran(orders, of):
    """Runs dry: a rank's F, B and W take 1 each, and F keeps one unit of 2 bytes."""
    chunks = of.num_stages // of.num_ranks
    kept = memory.constant(of, 2 // chunks)
    found = dry_run.dry_run(orders, of, residuals=kept)
    assert found.is_finished, str(found)
    return found.trace


def idle_inside(trace):
    """Returns the idle time of each rank between its first task and its last."""
    return [
        spans[-1].end_s - spans[0].start_s - sum(s.end_s - s.start_s for s in spans)
        for spans in trace.by_rank()
    ]


def peaks(trace):
    """Returns the peak of each rank in microbatches' activations."""
    return [peak / 2 for peak in trace.peak_bytes()]


def test_zb_h1_exactly():
    """P = 3, M = 4: rank s puts off s weight gradients."""
    assert [" ".join(map(str, order)) for order in zero_bubble.zb_h1(chain(3, 4))] == [
        "0F0 0F1 0F2 0B0 0W0 0F3 0B1 0W1 0B2 0W2 0B3 0W3",
        "1F0 1F1 1B0 1F2 1B1 1W0 1F3 1B2 1W1 1B3 1W2 1W3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2W0 2F3 2B3 2W1 2W2 2W3",
    ]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zb_h1_has_a_third_of_the_bubble_at_the_same_memory(num_ranks):
    """arXiv:2401.10241 §2: (P - 1)(F + B - W), where 1F1B has (P - 1)(F + B + W)."""
    of = chain(num_ranks)
    work = 3 * of.num_microbatches
    trace = ran(zero_bubble.zb_h1(of), of)
    assert trace.makespan_s == work + num_ranks - 1
    assert trace.peak_in_flight() == [num_ranks] * num_ranks
    whole = graph.chain(of.num_microbatches, of.placement)
    plain = ran(policies.fixed_orders(whole, Policy("1f1b")), whole)
    assert plain.makespan_s == work + 3 * (num_ranks - 1)
    assert max(plain.peak_in_flight()) == num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zb_h2_never_idles_at_almost_twice_the_memory(num_ranks):
    of = chain(num_ranks)
    trace = ran(zero_bubble.zb_h2(of), of)
    assert idle_inside(trace) == [0] * num_ranks
    assert max(trace.peak_in_flight()) == 2 * num_ranks - 1


@pytest.mark.parametrize("num_ranks", RANKS)
def test_zb_v_never_idles_at_the_memory_of_1f1b(num_ranks):
    """arXiv:2405.15362: a rank begins half a unit after the one before it."""
    of = v_chain(num_ranks)
    trace = ran(zero_bubble.zb_v(of), of)
    assert idle_inside(trace) == [0] * num_ranks
    assert trace.makespan_s == 3 * of.num_microbatches + (num_ranks - 1) / 2
    assert max(peaks(trace)) == num_ranks


@pytest.mark.parametrize("num_ranks", RANKS)
def test_v_half_holds_half_of_1f1b_and_a_constant(num_ranks):
    of = v_chain(num_ranks)
    trace = ran(zero_bubble.v_half(of), of)
    assert max(peaks(trace)) <= num_ranks / 2 + 2


def test_v_half_idles_less_than_1f1b_where_memory_is_worth_saving():
    for num_ranks, most in ((4, 6), (8, 12.5), (16, 25)):
        of = v_chain(num_ranks)
        bubble = ran(zero_bubble.v_half(of), of).makespan_s - 3 * of.num_microbatches
        assert bubble <= most < 3 * (num_ranks - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 30])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "v_half"])
def test_every_order_lists_each_task_once_and_finishes(name, num_ranks, count):
    make = chain if name.startswith("zb_h") else v_chain
    of = make(num_ranks, count)
    orders = getattr(zero_bubble, name)(of)
    ran(orders, of)
    for rank, order in enumerate(orders):
        assert sorted(order) == sorted(of.tasks(rank))


def test_zb_h1_knows_towers_skips_and_frozen_stages():
    """Vision 0 is frozen and skipped by 1: no B, no W, and no microbatch 1."""
    of = PipelineGraph(
        3,
        3,
        ((0, 2), (1, 2)),
        (0, 1, 2),
        frozenset({(0, 1)}),
        frozenset({0}),
        is_split=True,
    )
    assert zero_bubble.zb_h1(of) == [
        tuple(ts("0F0 0F2")),
        tuple(ts("1F0 1F1 1B0 1W0 1F2 1B1 1W1 1B2 1W2")),
        tuple(ts("2F0 2B0 2F1 2B1 2W0 2F2 2B2 2W1 2W2")),
    ]


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "v_half"])
def test_a_whole_backward_is_refused(name):
    with pytest.raises(ConfigError, match=f"order {name} needs a split backward"):
        getattr(zero_bubble, name)(graph.chain(4, V(2)))


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2"])
def test_several_stages_a_rank_are_refused_by_zb_h(name):
    with pytest.raises(ConfigError, match="a rank holds several stages"):
        getattr(zero_bubble, name)(v_chain(2))


@pytest.mark.parametrize("name", ["zb_v", "v_half"])
def test_another_placement_is_refused_by_the_orders_for_a_v(name):
    for placed in ((0, 1, 2, 3), (0, 1, 0, 1), (0, 0, 1, 1)):
        of = graph.chain(4, placed, is_split=True)
        with pytest.raises(ConfigError, match="for a chain in the shape of a V"):
            getattr(zero_bubble, name)(of)


def test_1f1b_on_a_split_backward_runs_each_w_after_its_b():
    (order,) = policies.fixed_orders(chain(1, 2), Policy("1f1b"))
    assert list(order) == ts("0F0 0B0 0W0 0F1 0B1 0W1")


def test_eager_1f1b_warms_up_with_twice_p_minus_s_minus_one():
    of = graph.chain(16, (0, 1, 2, 3))
    found = policies.fixed_orders(of, Policy("eager_1f1b"))
    warm_ups = [[a.kind for a in order].index(Kind.B) - 1 for order in found]
    assert warm_ups == [2 * (4 - s) - 1 for s in range(4)]
