"""Which device sends what to whom when a value goes from one mesh to another.

Both sides work this out alone and agree, since all it depends on is known to both: the
two shardings and the shape. A value whose parts are cut alike on both sides travels
part by part between single devices, none of them twice to one process; one that is cut
differently (tensor-parallel or data-parallel ways differ) is put together anew from the
parts that overlap.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

Box = tuple[tuple[int, int], ...]  # for each axis: from, to


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


@functools.lru_cache(maxsize=4096)  # few shapes, again in each microbatch
def pieces(
    source: jax.sharding.Sharding,
    target: jax.sharding.Sharding,
    shape: tuple[int, ...],
) -> tuple[Piece, ...]:
    """Returns all parts that have to travel, those within a process included."""
    owners: dict[Box, list[jax.Device]] = {}
    for device, box in boxes(source, shape):
        owners.setdefault(box, []).append(device)
    needs: dict[int, list[Box]] = {}
    for device, box in boxes(target, shape):
        needs.setdefault(device.process_index, []).append(box)
    found = []
    for number, receiver in enumerate(sorted(needs)):
        for box, devices in sorted(owners.items()):
            if any(overlap(box, need) is not None for need in needs[receiver]):
                near = [d for d in devices if d.process_index == receiver]
                sender = near[0] if near else devices[number % len(devices)]
                found.append(Piece(box, sender, receiver))
    return tuple(found)


def boxes(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...]
) -> list[tuple[jax.Device, Box]]:
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
    return sorted(found, key=lambda each: each[0].id)


def overlap(one: Box, other: Box) -> Box | None:
    """Returns what two boxes share; None if that is nothing."""
    shared = tuple(
        (max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)
    )
    return None if any(a >= b for a, b in shared) else shared


def shape_of(box: Box) -> tuple[int, ...]:
    """Returns the shape of what a box cuts out."""
    return tuple(b - a for a, b in box)


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
