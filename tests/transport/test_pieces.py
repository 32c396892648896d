"""Plans of who sends what to whom, over devices of several processes.

The devices are stand-ins: a plan only asks for their ids and their processes.
"""

import collections
import dataclasses
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rrfp_jax.transport import pieces
from rrfp_jax.transport.base import Expected


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    process_index: int


@dataclasses.dataclass(frozen=True)
class FakeSharding:
    """Cuts each axis in so many ways; what is left of the devices has copies."""

    devices: tuple[FakeDevice, ...]
    ways: tuple[int, ...]

    def devices_indices_map(self, shape):
        grid = list(itertools.product(*map(range, self.ways)))
        found = {}
        for i, device in enumerate(self.devices):
            at = grid[i * len(grid) // len(self.devices)]
            sizes = [n // w for n, w in zip(shape, self.ways, strict=True)]
            found[device] = tuple(
                slice(a * size, (a + 1) * size)
                for a, size in zip(at, sizes, strict=True)
            )
        return found


class Turned(FakeSharding):
    """Names the last device first."""

    def devices_indices_map(self, shape):
        return dict(reversed(super().devices_indices_map(shape).items()))


def devices(first, processes, per_process):
    return tuple(
        FakeDevice(first + i, processes[i // per_process])
        for i in range(len(processes) * per_process)
    )


@st.composite
def shardings(draw, first, lowest_process):
    """Over up to three processes, some perhaps at both ends."""
    start = lowest_process + draw(st.integers(0, 2))
    processes = range(start, start + draw(st.integers(1, 3)))
    found = devices(first, processes, draw(st.sampled_from((1, 2, 4))))
    ways = draw(
        st.sampled_from(
            [w for w in itertools.product((1, 2, 4), (1, 2, 3)) if _fits(w, found)]
        )
    )
    return FakeSharding(draw(st.permutations(found).map(tuple)), ways)


def _fits(ways, found):
    return len(found) % (ways[0] * ways[1]) == 0


SHAPES = st.sampled_from([(12, 12), (4, 6), (8, 0)])


@given(shardings(0, 0), shardings(100, 1), SHAPES)
def test_a_plan_brings_each_process_what_it_needs_and_nothing_twice(
    source, target, shape
):
    plan = pieces.pieces(source, target, shape)
    assert len({(p.box, p.receiver) for p in plan}) == len(plan)
    owned = dict(pieces.boxes(source, shape))
    has = collections.defaultdict(lambda: np.zeros(shape, bool))
    for box, sender, receiver in plan:
        assert owned[sender] == box
        has[receiver][tuple(slice(*each) for each in box)] = True
    needs = collections.defaultdict(lambda: np.zeros(shape, bool))
    for device, box in pieces.boxes(target, shape):
        needs[device.process_index][tuple(slice(*each) for each in box)] = True
    for process, needed in needs.items():
        assert (has[process] >= needed).all()
    assert set(has) <= set(needs)


@given(shardings(0, 0), shardings(100, 1), SHAPES)
def test_no_part_travels_that_is_not_needed(source, target, shape):
    mine = collections.defaultdict(list)
    for device, box in pieces.boxes(target, shape):
        mine[device.process_index].append(box)
    for box, _, receiver in pieces.pieces(source, target, shape):
        assert any(pieces.overlap(box, need) is not None for need in mine[receiver])


@given(shardings(0, 0), shardings(100, 1), SHAPES)
def test_what_a_process_has_does_not_leave_it(source, target, shape):
    owners = collections.defaultdict(set)
    for device, box in pieces.boxes(source, shape):
        owners[box].add(device.process_index)
    for box, sender, receiver in pieces.pieces(source, target, shape):
        if receiver in owners[box]:
            assert sender.process_index == receiver


@given(shardings(0, 0), shardings(100, 1))
def test_both_ends_plan_alike(source, target):
    """Whatever the order in which JAX names the devices."""
    turned = (Turned(each.devices, each.ways) for each in (source, target))
    assert pieces.pieces(*turned, (12, 12)) == pieces.pieces(source, target, (12, 12))


@pytest.mark.parametrize("per_process", [1, 2])
def test_owners_take_turns(per_process):
    """Over the receivers of one part, and over the parts for one receiver."""
    source = FakeSharding(devices(0, (0, 1), per_process), (1, 1))
    target = FakeSharding(devices(100, (2, 3, 4, 5), 1), (4, 1))
    count = collections.Counter(p.sender for p in pieces.pieces(source, target, (4, 4)))
    assert set(count.values()) == {2 // per_process}
    assert len(count) == 2 * per_process
    source = FakeSharding(devices(0, (0, 1, 0, 1, 0, 1, 0, 1), 1), (4, 1))
    target = FakeSharding(devices(100, (2,), 1), (1, 1))
    plan = pieces.pieces(source, target, (4, 4))
    assert collections.Counter(p.sender.process_index for p in plan) == {0: 2, 1: 2}


def expected(*shapes, senders=(0, 1), receivers=(2, 3)):
    source = FakeSharding(devices(0, senders, 1), (2, 1))
    target = FakeSharding(devices(100, receivers, 1), (2, 1))
    avals = [SimpleNamespace(shape=shape) for shape in shapes]
    rest = [source] * len(shapes), [target] * len(shapes)
    return Expected(avals, *rest, senders, receivers)


def test_a_route_names_array_part_and_device():
    low, high = ((0, 2), (0, 3)), ((2, 4), (0, 3))
    routes = pieces.routes(expected((4, 3), (4, 3)))
    first, second = devices(0, (0, 1), 1)
    assert routes == {
        (0, 2): {(0, low): first, (1, low): first},
        (1, 3): {(0, high): second, (1, high): second},
    }


@pytest.mark.parametrize("shapes", [(), ((4, 0),)])
def test_the_first_sender_tells_all_receivers_of_what_has_no_parts(shapes):
    assert pieces.routes(expected(*shapes)) == {(0, 2): {}, (0, 3): {}}


BOX = ((0, 4), (2, 6))


@pytest.mark.parametrize(
    ("other", "shared"),
    [
        (((2, 6), (0, 3)), ((2, 4), (2, 3))),
        (BOX, BOX),
        (((4, 8), (2, 6)), None),
        (((0, 4), (3, 3)), None),
    ],
)
def test_boxes_overlap_or_do_not(other, shared):
    assert pieces.overlap(BOX, other) == shared
    assert pieces.overlap(other, BOX) == shared
    assert pieces.overlap((), ()) == ()


def test_parts_that_are_cut_differently_are_pasted():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    columns = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "x"))
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    parts = {
        ((0, 2), (0, 6)): value[:2],
        ((2, 4), (0, 6)): jax.device_put(value[2:], jax.devices()[1]),
    }
    aval = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    found = pieces.assemble(parts, columns, aval)
    assert found.sharding == columns
    np.testing.assert_array_equal(found, value)
