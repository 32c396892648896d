"""Fixed orders: warm-ups, depths, Megatron's formula, and what cannot finish."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax.core import dry_run, graph, orders, placement
from rrfp_jax.core.graph import PipelineGraph
from rrfp_jax.core.task import Kind
from rrfp_jax.errors import ConfigError
from tests.core import instrument, strategies
from tests.core.instrument import ts

TOWERS = ((0, 1), (1, 3), (2, 3), (3, 4))


def texts(found):
    """Returns orders as text."""
    return [" ".join(map(str, order)) for order in found]


def peaks(found, of):
    """Checks that orders finish and returns the peak in flight of each rank."""
    dry_run.check_finishes(found, of)
    return [orders.peak_in_flight(order, of, r) for r, order in enumerate(found)]


def warm_up(order):
    """Returns how many forwards come before the first backward."""
    return [a.kind for a in order].index(Kind.B)


def test_1f1b_on_a_chain_exactly():
    assert texts(orders.one_forward_one_backward(graph.chain(4, (0, 1, 2)))) == [
        "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3",
        "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3",
        "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_stage_s_of_a_chain_holds_p_minus_s_microbatches(num_ranks):
    """P - s forwards before the first backward (PipeDream)."""
    of = graph.chain(16, placement.one_each(num_ranks))
    found = orders.one_forward_one_backward(of)
    assert [warm_up(order) for order in found] == list(range(num_ranks, 0, -1))
    assert peaks(found, of) == list(range(num_ranks, 0, -1))


def test_1f1b_with_fewer_microbatches_than_stages_is_gpipe():
    """C01: M = 2 on 4 stages; the warm-up is cut at M, and stage 3 alternates."""
    assert texts(orders.one_forward_one_backward(graph.chain(2, (0, 1, 2, 3)))) == [
        "0F0 0F1 0B0 0B1",
        "1F0 1F1 1B0 1B1",
        "2F0 2F1 2B0 2B1",
        "3F0 3B0 3F1 3B1",
    ]


def test_1f1b_on_towers_counts_own_plus_language_stages():
    """Cornstarch: vision 0 -> 1, text 2, joined by language 3 -> 4."""
    of = PipelineGraph(5, 8, TOWERS, placement.one_each(5))
    found = orders.one_forward_one_backward(of)
    assert orders.depths(of) == [4, 3, 3, 2, 1]
    assert [warm_up(order) for order in found] == [4, 3, 3, 2, 1]
    dry_run.check_finishes(found, of)


def test_depth_is_the_longest_path_past_skip_edges():
    skip = PipelineGraph(4, 1, ((0, 1), (1, 2), (2, 3), (0, 3)), (0, 1, 2, 3))
    assert orders.depths(skip) == [4, 3, 2, 1]


def test_deep_1f1b_multiplies_the_depth():
    of = graph.chain(16, (0, 1, 2, 3))
    twice = orders.one_forward_one_backward(of, 2.0)
    assert [warm_up(order) for order in twice] == [8, 6, 4, 2]
    half_more = orders.one_forward_one_backward(of, 1.5)  # 6, 4.5, 3, 1.5, rounded up
    assert [warm_up(order) for order in half_more] == [6, 5, 3, 2]
    assert peaks(twice, of) == [8, 6, 4, 2]


def test_a_factor_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_factor=0.5 is shallower than 1F1B"):
        orders.one_forward_one_backward(graph.chain(1, (0, 1)), 0.5)


def test_gpipe_is_all_forwards_then_all_backwards():
    of = graph.chain(2, placement.v_shaped(2))
    assert texts(orders.gpipe(of)) == [
        "0F0 0F1 3F0 3F1 3B0 3B1 0B0 0B1",
        "1F0 1F1 2F0 2F1 2B0 2B1 1B0 1B1",
    ]


def test_orders_leave_out_tasks_that_do_not_exist():
    """Stage 0 is frozen and microbatch 1 skips it."""
    of = PipelineGraph(2, 2, ((0, 1),), (0, 1), frozenset({(0, 1)}), frozenset({0}))
    assert texts(orders.gpipe(of)) == ["0F0", "1F0 1F1 1B0 1B1"]
    found = orders.one_forward_one_backward(of)
    assert texts(found) == ["0F0", "1F0 1B0 1F1 1B1"]


def test_interleaved_1f1b_is_megatrons():
    """2 ranks x 2 chunks, M = 4: warm-up 2(P - r - 1) + (C - 1)P, groups of P."""
    of = graph.chain(4, placement.interleaved(2, 2))
    assert texts(orders.one_forward_one_backward(of)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (2, 3), (4, 2), (3, 4)])
def test_interleaved_1f1b_finishes_with_megatrons_warm_up(ranks, chunks):
    of = graph.chain(3 * ranks, placement.interleaved(ranks, chunks))
    found = orders.one_forward_one_backward(of)
    dry_run.check_finishes(found, of)
    assert [warm_up(order) for order in found] == [
        2 * (ranks - r - 1) + (chunks - 1) * ranks + 1 for r in range(ranks)
    ]


def test_a_larger_group_of_microbatches_warms_up_longer():
    """Megatron: 2(P - r - 1) + (C - 1)N, N microbatches a chunk's turn."""
    of = graph.chain(12, placement.interleaved(2, 2))
    found = orders.one_forward_one_backward(of, group=4)
    dry_run.check_finishes(found, of)
    assert [warm_up(order) for order in found] == [7, 5]
    assert list(found[0][:8]) == ts("0F0 0F1 0F2 0F3 2F0 2F1 2F2 2B0")


def test_a_last_group_that_still_feeds_every_rank_is_legal():
    """M mod N = 2 = P; Megatron refuses only a remainder below P."""
    of = graph.chain(10, placement.interleaved(2, 2))
    found = orders.one_forward_one_backward(of, group=4)
    dry_run.check_finishes(found, of)
    for rank, order in enumerate(found):
        assert sorted(order) == sorted(of.tasks(rank))


@pytest.mark.parametrize(
    ("count", "group", "message"),
    [
        (8, 1, "microbatch_group=1 is not between the 2 ranks and the 8 microbatches"),
        (8, 9, "microbatch_group=9 is not between"),
        (9, 4, "9 microbatches on 2 ranks x 2 chunks in groups of 4"),
    ],
)
def test_a_group_that_starves_a_rank_is_refused(count, group, message):
    of = graph.chain(count, placement.interleaved(2, 2))
    with pytest.raises(ConfigError, match=message):
        orders.one_forward_one_backward(of, group=group)


def test_deep_interleaved_1f1b_deepens_all_ranks_alike():
    """Half of rank 0's warm-up of 10 more, for every rank: 5 deeper."""
    of = graph.chain(12, placement.interleaved(4, 2))
    plain, deep = (orders.one_forward_one_backward(of, f) for f in (1.0, 1.5))
    assert [warm_up(order) for order in plain] == [11, 9, 7, 5]
    assert [warm_up(order) for order in deep] == [16, 14, 12, 10]


@pytest.mark.parametrize(("count", "legal"), [(1, "2"), (3, "2 or 4"), (5, "4 or 6")])
def test_interleaved_1f1b_needs_whole_groups(count, legal):
    """C02: one error with M, ranks, chunks and the nearest legal values."""
    of = graph.chain(count, placement.interleaved(2, 2))
    with pytest.raises(ConfigError) as caught:
        orders.one_forward_one_backward(of)
    text = str(caught.value)
    assert f"cannot order {count} microbatches on 2 ranks x 2 chunks" in text
    assert f"--config.pipeline.num_microbatches to {legal}, or" in text


@pytest.mark.parametrize(
    "of",
    [
        graph.chain(4, placement.v_shaped(2)),
        graph.chain(4, (0, 0, 1, 1)),
        PipelineGraph(5, 4, TOWERS, (0, 1, 0, 0, 1)),
        PipelineGraph(4, 2, graph.chain_edges(4), (0, 1, 0, 1), frozenset({(0, 1)})),
    ],
)
def test_1f1b_is_refused_where_it_is_not_defined(of):
    with pytest.raises(
        ConfigError, match="1f1b is not defined for placement"
    ) as caught:
        orders.one_forward_one_backward(of)
    assert str(of.placement) in str(caught.value)


def test_the_remedy_where_1f1b_is_not_defined_can_be_followed():
    """gpipe and a CSV are values of pipeline.hint."""
    with pytest.raises(ConfigError) as caught:
        orders.one_forward_one_backward(graph.chain(4, placement.v_shaped(2)))
    assert "--config.pipeline.hint to gpipe" in str(caught.value)


def test_a_deadlock_is_found_and_every_stuck_task_is_named():
    """Rank 0 wants its backward before the forward that rank 1 waits for."""
    of = graph.chain(2, (0, 1))
    crossed = [tuple(ts("0F0 0B0 0F1 0B1")), tuple(ts("1F0 1F1 1B0 1B1"))]
    with pytest.raises(ConfigError) as caught:
        dry_run.check_finishes(crossed, of)
    text = str(caught.value)
    assert "cannot finish: its ranks wait for each other" in text
    assert "!0B0" in text
    grid = [line for line in text.splitlines() if "rank" in line and "|" in line]
    assert grid[0].endswith("  misses 1B0")
    assert grid[1].endswith("  misses 0F1")
    assert "!1F1" in grid[1]
    assert "--config.pipeline.order=readiness --config.pipeline.hint=" in text


def test_an_order_that_breaks_a_rule_of_its_own_rank_cannot_finish():
    with pytest.raises(ConfigError, match=r"!0B0.*misses 0F0"):
        dry_run.check_finishes([tuple(ts("0B0 0F0"))], graph.chain(1, (0,)))


def test_peak_in_flight_of_gpipe_is_m():
    of = graph.chain(5, (0, 1, 2))
    assert peaks(orders.gpipe(of), of) == [5, 5, 5]


def test_peak_in_flight_counts_microbatches_also_with_chunks():
    """Rank 0 holds two stages; all four microbatches are in flight, never five."""
    of = graph.chain(4, placement.interleaved(2, 2))
    found = orders.one_forward_one_backward(of)
    assert peaks(found, of) == [4, 3]


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from([1.0, 1.5, 2.0, 9.0]))
@settings(derandomize=True, deadline=None)
def test_every_depth_of_1f1b_finishes_on_every_chain(num_ranks, count, factor):
    """C01: any M, and the peak is min(M, ceil(factor * (P - s)))."""
    of = graph.chain(count, placement.one_each(num_ranks))
    found = orders.one_forward_one_backward(of, factor)
    depths = range(num_ranks, 0, -1)
    assert peaks(found, of) == [min(count, -int(-factor * d // 1)) for d in depths]


@given(
    st.integers(1, 4),
    st.integers(2, 4),
    st.integers(1, 4),
    st.sampled_from([1.0, 1.2, 2.0, 9.0]),
)
@settings(derandomize=True, deadline=None)
def test_every_depth_of_interleaved_1f1b_finishes(ranks, chunks, groups, factor):
    """A deeper warm-up must keep the ranks in step with each other."""
    of = graph.chain(groups * ranks, placement.interleaved(ranks, chunks))
    found = orders.one_forward_one_backward(of, factor)
    assert max(peaks(found, of)) <= groups * ranks
    for rank, order in enumerate(found):
        assert sorted(order) == sorted(of.tasks(rank))


@given(strategies.graphs())
@settings(derandomize=True, deadline=None)
def test_gpipe_lists_each_task_once_and_finishes_on_every_pipeline(of):
    """Also with towers, skips and frozen stages."""
    found = orders.gpipe(of)
    dry_run.check_finishes(found, of)
    listed = [a for order in found for a in order]
    assert sorted(listed) == sorted(instrument.needs(of))
