"""Which device sends what to whom when values go from one mesh to another.

Both sides work this out alone and agree, since all it depends on is known to both: the
two shardings and the shapes. A value whose parts are cut alike on both sides travels
part by part between single devices, none of them twice to one process; one that is cut
differently (tensor-parallel or data-parallel ways differ) is put together anew from the
parts that overlap.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rrfp_jax.transport.base import Expected

Box = tuple[tuple[int, int], ...]  # for each axis: from, to
Key = tuple[int, Box]  # which array of a payload, and which part of it


class Piece(NamedTuple):
    """A part of a value on its way to a process.

    Attributes:
      box: where in the value it is.
      sender: the device that has it.
      receiver: the process that needs it.
    """

    box: Box
    sender: jax.Device
    receiver: int


def routes(expected: Expected) -> dict[tuple[int, int], dict[Key, jax.Device]]:
    """Returns which process tells which of what: by sender and receiver, the parts.

    The devices are those that have them. A receiver for which there is no part, since
    the message has no arrays or none with elements, is told so by the first sender.
    """
    found: dict[tuple[int, int], dict[Key, jax.Device]] = {}
    rows = zip(expected.avals, expected.sources, expected.targets, strict=True)
    for index, (aval, source, target) in enumerate(rows):
        for box, device, receiver in pieces(source, target, aval.shape):
            route = found.setdefault((device.process_index, receiver), {})
            route[index, box] = device
    told = {receiver for _, receiver in found}
    for receiver in expected.receivers:
        if receiver not in told:
            found[expected.senders[0], receiver] = {}
    return found


@functools.lru_cache(maxsize=4096)  # few shapes, again in each microbatch
def pieces(
    source: jax.sharding.Sharding,
    target: jax.sharding.Sharding,
    shape: tuple[int, ...],
) -> tuple[Piece, ...]:
    """Returns all parts that have to travel, those within a process included.

    What a process has itself comes from there. Else those that have the same take
    turns, over receivers and parts.
    """
    owners: dict[Box, list[jax.Device]] = {}
    for device, box in boxes(source, shape):
        owners.setdefault(box, []).append(device)
    needs: dict[int, list[Box]] = {}
    for device, box in boxes(target, shape):
        needs.setdefault(device.process_index, []).append(box)
    found = []
    for number, receiver in enumerate(sorted(needs)):
        for place, (box, devices) in enumerate(sorted(owners.items())):
            if any(overlap(box, need) is not None for need in needs[receiver]):
                near = [d for d in devices if d.process_index == receiver]
                sender = near[0] if near else devices[(number + place) % len(devices)]
                found.append(Piece(box, sender, receiver))
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def boxes(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> tuple[tuple[jax.Device, Box], ...]:
    """Returns the part of each device, by the order of their ids."""
    indices = sharding.devices_indices_map(shape)
    found = [
        (
            device,
            tuple(
                cut.indices(size)[:2] for cut, size in zip(index, shape, strict=True)
            ),
        )
        for device, index in indices.items()
    ]
    return tuple(sorted(found, key=lambda each: each[0].id))


def overlap(one: Box, other: Box) -> Box | None:
    """Returns what two boxes share; None if that is nothing."""
    shared = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)
    )
    return None if any(a >= b for a, b in shared) else shared


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of what a box cuts out."""
    return tuple(b - a for a, b in box)


def on_device(array: jax.Array, device: jax.Device) -> Any:
    """Returns the part of an array that a device of this process has."""
    if array.is_fully_addressable and len(array.sharding.device_set) == 1:
        return array
    return next(s.data for s in array.addressable_shards if s.device == device)


def wanted(key: Key, expected: Expected, process: int) -> jax.ShapeDtypeStruct:
    """Returns a part as it is pulled: onto one device of the process that needs it."""
    index, box = key
    aval, target = expected.avals[index], expected.targets[index]
    mine = [
        (device, need)
        for device, need in boxes(target, aval.shape)
        if device.process_index == process
    ]
    needing = [device for device, need in mine if need == box]
    device = needing[0] if needing else mine[0][0]
    return jax.ShapeDtypeStruct(
        shape_of(box),
        aval.dtype,
        sharding=jax.sharding.SingleDeviceSharding(device),
    )


def assemble(
    parts: dict[Box, Any], target: jax.sharding.Sharding, aval: jax.ShapeDtypeStruct
) -> jax.Array:
    """Puts parts together on the devices of this process.

    Args:
      parts: arrays, on the host or on a device of this process, that cover what the
        devices of this process need.
      target: where the value is to lie.
      aval: of the whole value.
    """
    placed = []
    for device, box in boxes(target, aval.shape):
        if device.process_index == jax.process_index():
            part = parts[box] if box in parts else _pasted(parts, box, aval.dtype)
            placed.append(jax.device_put(part, device))
    return jax.make_array_from_single_device_arrays(
        aval.shape, target, placed, dtype=aval.dtype
    )


def _pasted(parts: dict[Box, Any], box: Box, dtype: Any) -> np.ndarray[Any, Any]:
    """Cuts a box out of parts that are cut differently, on the host."""
    pasted = np.empty(shape_of(box), dtype)
    for other, part in parts.items():
        shared = overlap(other, box)
        if shared is not None:
            pasted[_within(shared, box)] = np.asarray(part)[_within(shared, other)]
    return pasted


def _within(shared: Box, box: Box) -> tuple[slice, ...]:
    pairs: Sequence[Any] = list(zip(shared, box, strict=True))
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in pairs)


# Keys of `jax.random` travel as the numbers that they consist of, which lie as they do.


def plain(array: jax.Array) -> jax.Array:
    """Returns the numbers of keys; any other array as it is."""
    return jax.random.key_data(array) if _is_key(array.dtype) else array


def as_plain(expected: Expected) -> Expected:
    """Returns what a message brings when all of its arrays are plain."""
    if not any(_is_key(aval.dtype) for aval in expected.avals):
        return expected
    avals = [
        jax.eval_shape(jax.random.key_data, aval) if _is_key(aval.dtype) else aval
        for aval in expected.avals
    ]
    return expected._replace(avals=avals)


def restored(array: jax.Array, dtype: Any) -> jax.Array:
    """Returns what was made plain as it was."""
    if not _is_key(dtype):
        return array
    impl = jax.random.key_impl(jax.numpy.empty((0,), dtype))
    keys: jax.Array = jax.random.wrap_key_data(array, impl=impl)
    return keys


def _is_key(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))
