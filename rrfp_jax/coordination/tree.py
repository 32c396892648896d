"""The tree along which the members of a large group gather values. Pure.

Every node speaks for a range of members: for its first, which is the node itself, and
for the rest, cut into at most `FAN_OUT` ranges of about one size, whose nodes are its
children. So what a node and its children have, one after the other, is in the order of
the members; and neighbours, which often share a host, are near each other.
"""

from typing import NamedTuple

FAN_OUT = 8


class Place(NamedTuple):
    """Where a member is in the tree; members are counted from 0."""

    parent: int | None  # None for the root, member 0
    children: tuple[int, ...]  # ascending


def place_of(member: int, size: int) -> Place:
    """Returns the place of a member of a group of `size`."""
    parent, node, end = None, 0, size
    while node != member:
        starts = _children(node, end)
        ends = (*starts[1:], end)
        parent = node
        node, end = next(
            (start, stop)
            for start, stop in zip(starts, ends, strict=True)
            if start <= member < stop
        )
    return Place(parent, _children(node, end))


def _children(node: int, end: int) -> tuple[int, ...]:
    """Returns where the ranges begin into which the range after a node is cut."""
    rest = end - node - 1
    count = min(FAN_OUT, rest)
    return tuple(node + 1 + rest * i // count for i in range(count))
