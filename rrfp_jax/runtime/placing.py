"""The devices of a pipeline rank and how values lie on them.

A rank is a mesh with the axes `data` and `model`. Parameters follow the partition
specs of their stage (replicated without any); activations, cotangents and feeds are
split over `data` along their first axis where that divides it, and replicated over
`model`. XLA inserts the collectives. A mesh may span several processes; each then
launches the same programs, and puts and gets only the parts on its own devices.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from rrfp_jax.errors import ConfigError
from rrfp_jax.transport.in_process import copied

DATA, MODEL = "data", "model"


@dataclasses.dataclass(frozen=True)
class RankMesh:
    """The devices that run the tasks of one pipeline rank."""

    mesh: jax.sharding.Mesh

    @property
    def device(self) -> jax.Device:
        """The first device; the only one of most ranks."""
        device: jax.Device = self.mesh.devices.flat[0]
        return device

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that drive the devices, ascending."""
        return tuple(sorted({d.process_index for d in self.mesh.devices.flat}))

    @functools.cached_property
    def is_here(self) -> bool:
        """Whether this process drives any of the devices."""
        return jax.process_index() in self.processes

    @functools.cached_property
    def replicated(self) -> Sharding:
        """Where a value is whole on every device."""
        return self._sharding(PartitionSpec())

    @functools.cached_property
    def split(self) -> Sharding:
        """Where a value is cut over `data` along its first axis."""
        return self._sharding(PartitionSpec(DATA))

    def of_value(self, shape: Sequence[int]) -> Sharding:
        """Returns where an activation, cotangent or feed of `shape` lies."""
        ways = self.mesh.shape[DATA]
        if ways > 1 and shape and shape[0] and shape[0] % ways == 0:
            return self.split
        return self.replicated

    def of_parameter(
        self, spec: PartitionSpec | None, shape: Sequence[int]
    ) -> Sharding:
        """Returns where a parameter with this spec (None: whole) and shape lies.

        Raises:
          ConfigError: the mesh does not divide it.
        """
        spec = spec or PartitionSpec()
        for axes, size in zip(spec, shape, strict=False):
            names = axes if isinstance(axes, tuple) else (axes,) if axes else ()
            ways = math.prod(self.mesh.shape[name] for name in names)
            if size % ways:
                raise ConfigError(
                    f"mesh.{'.'.join(names)}={ways} does not divide a parameter of "
                    f"shape {tuple(shape)}, cut by {spec}.\n"
                    f"  Set --config.mesh.{names[0]} to a divisor of {size}."
                )
        return self._sharding(spec)

    def _sharding(self, spec: PartitionSpec) -> Sharding:
        if self.mesh.size == 1:
            return SingleDeviceSharding(self.device)
        return NamedSharding(self.mesh, spec)


def mesh_of(devices: Sequence[jax.Device], data: int, model: int) -> RankMesh:
    """Returns the rank of so many devices, the model axis innermost."""
    grid = np.array(devices).reshape(data, model)
    return RankMesh(jax.sharding.Mesh(grid, (DATA, MODEL)))


def put(values: Sequence[Any], shardings: Sequence[Sharding]) -> list[Any]:
    """Returns values on the devices where they belong, without communication.

    Args:
      values: arrays of this process. Where a sharding spans several processes, all of
        them have the same ones.
      shardings: of each.
    """
    if all(sharding.is_fully_addressable for sharding in shardings):
        return copied(values, shardings)
    return [_put(*each) for each in zip(values, shardings, strict=True)]


def _put(value: Any, sharding: Sharding) -> Any:
    if sharding.is_fully_addressable:
        return jax.device_put(value, sharding)
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, sharding, lambda i: whole[i])


def make_ranks(
    num_ranks: int,
    data: int = 1,
    model: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> list[RankMesh]:
    """Divides devices among pipeline ranks, consecutive ones together.

    Args:
      num_ranks: pipeline ranks.
      data: data-parallel ways within a rank.
      model: tensor-parallel ways within a rank.
      devices: by default all of this process.

    Raises:
      ConfigError: there are fewer devices than that needs.
    """
    found = list(jax.local_devices() if devices is None else devices)
    size = data * model
    if len(found) < num_ranks * size:
        raise ConfigError(
            f"pipeline.num_ranks={num_ranks} x mesh.data={data} x mesh.model={model} "
            f"needs {num_ranks * size} devices; there are {len(found)}.\n"
            "  Lower one of them or, on a CPU, set --config.mesh.num_cpu_devices="
            f"{num_ranks * size}."
        )
    return [
        mesh_of(found[r * size : (r + 1) * size], data, model) for r in range(num_ranks)
    ]


def avals_with(shardings: Sequence[Sharding], avals: Sequence[Any]) -> list[Any]:
    """Returns `avals` with a sharding each, as ahead-of-time lowering takes them."""
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
        for a, s in zip(avals, shardings, strict=True)
    ]
