"""Everybody has one place in the tree, and what comes up it is in order."""

import pytest

from rrfp_jax.coordination import tree

SIZES = [*range(1, 20), 72, 73, 74, 4096]


def in_order(node, size):
    """Returns a node and all under it: first itself, then what each child has."""
    found = [node]
    for child in tree.place_of(node, size).children:
        found += in_order(child, size)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_what_comes_up_the_tree_is_that_of_all_in_their_order(size):
    assert in_order(0, size) == list(range(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_child_knows_its_parent_and_nobody_has_many(size):
    places = [tree.place_of(member, size) for member in range(size)]
    assert places[0].parent is None
    parents = {c: p for p, place in enumerate(places) for c in place.children}
    assert [place.parent for place in places[1:]] == [
        parents[c] for c in range(1, size)
    ]
    assert max(len(place.children) for place in places) == min(tree.FAN_OUT, size - 1)


@pytest.mark.parametrize(("size", "most"), [(9, 1), (73, 2), (512, 3), (16384, 5)])
def test_the_root_is_few_hops_from_each(size, most):
    hops = {None: -1}
    for member in range(size):  # a parent comes before its children
        hops[member] = hops[tree.place_of(member, size).parent] + 1
    assert max(hops.values()) == most
