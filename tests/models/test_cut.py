"""Cuts by count and by cost, against every cut there is."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rrfp_jax import errors
from rrfp_jax.models import cut

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def every_cut(num_layers, num_parts):
    for inner in itertools.combinations(range(1, num_layers), num_parts - 1):
        yield [b - a for a, b in itertools.pairwise([0, *inner, num_layers])]


def part_costs(costs, counts):
    return [sum(part) for part in cut.by_counts(costs, counts)]


def smallest_maximum(costs, num_parts):
    cuts = every_cut(len(costs), num_parts)
    return min(max(part_costs(costs, counts)) for counts in cuts)


def test_counts_cut_in_order():
    assert cut.by_counts("abcdef", [1, 3, 2]) == [
        ("a",),
        ("b", "c", "d"),
        ("e", "f"),
    ]


@pytest.mark.parametrize("counts", [[2, 2], [4, 3], [0, 6], [7, -1], []])
def test_counts_that_do_not_cover_the_layers_are_refused(counts):
    with pytest.raises(errors.ConfigError, match="has 6 layers"):
        cut.by_counts("abcdef", counts)


@given(st.data(), COSTS)
@settings(deadline=None, max_examples=60, derandomize=True)
def test_balanced_has_the_smallest_largest_part_and_then_the_evenest(data, costs):
    num_parts = data.draw(st.integers(1, len(costs)))
    counts = cut.balanced(costs, num_parts)
    assert len(counts) == num_parts

    def rank(counts):
        parts = part_costs(costs, counts)
        return max(parts), sum(part * part for part in parts)

    assert rank(counts) == min(map(rank, every_cut(len(costs), num_parts)))


@given(st.data(), st.lists(COSTS, min_size=1, max_size=3))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_apportioned_stages_have_the_smallest_largest_stage(data, towers):
    num_stages = data.draw(st.integers(len(towers), sum(map(len, towers))))
    shares = cut.apportion(towers, num_stages)
    assert sum(shares) == num_stages

    def largest(shares):
        return max(map(smallest_maximum, towers, shares))

    choices = itertools.product(*(range(1, len(tower) + 1) for tower in towers))
    assert largest(shares) == min(
        largest(choice) for choice in choices if sum(choice) == num_stages
    )


def test_a_dear_last_layer_stands_alone():
    assert cut.balanced([0.0, 1, 1, 1, 1, 3], 3) == [3, 2, 1]
    assert cut.balanced([0.1] * 10, 4) == [2, 2, 3, 3]


@pytest.mark.parametrize("num_parts", [0, 4])
def test_more_parts_than_layers_are_refused(num_parts):
    with pytest.raises(errors.ConfigError, match=r"3 layers(.|\n)*1 to 3 stages"):
        cut.balanced([1, 2, 3], num_parts)


@pytest.mark.parametrize("num_stages", [1, 6])
def test_stages_that_no_towers_can_share_are_refused(num_stages):
    with pytest.raises(errors.ConfigError, match="2 to 5 stages"):
        cut.apportion([[1, 2], [3, 4, 5]], num_stages)
