"""A pipeline rank together with its copies in all data-parallel replicas.

Replicas are independent pipelines: in a step they share nothing. At its end the
gradients of a stage are reduced over its copies, once; this is the mesh they are
reduced on, with the axis `replica` in front of a rank's own. Parameters lie on it whole
in each replica; optimizer states too, or cut over the replicas (ZeRO-1,
arXiv:1910.02054 §5.1).

Values on this mesh and on that of one replica are the same buffers, seen in two ways.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from rrfp_jax.runtime import placing
from rrfp_jax.runtime.placing import RankMesh

REPLICA = "replica"


@dataclasses.dataclass(frozen=True)
class Replicas:
    """One pipeline rank, in all replicas.

    Attributes:
      ranks: it, by replica.
    """

    ranks: tuple[RankMesh, ...]

    @property
    def is_here(self) -> bool:
        """Whether this process drives any of the devices."""
        return any(rank.is_here for rank in self.ranks)

    @functools.cached_property
    def processes(self) -> tuple[int, ...]:
        """The processes that drive the devices, ascending."""
        return tuple(sorted({p for rank in self.ranks for p in rank.processes}))

    @functools.cached_property
    def mesh(self) -> Mesh:
        """All devices: by replica, then as in a rank."""
        grid = np.stack([rank.mesh.devices for rank in self.ranks])
        return Mesh(grid, (REPLICA, placing.DATA, placing.MODEL))

    @property
    def replicated(self) -> Sharding:
        """Where a value is whole on every device."""
        return self.over(self.ranks[0].replicated)

    def over(self, sharding: Sharding) -> Sharding:
        """Returns where a value lies that lies so in each replica."""
        if len(self.ranks) == 1:
            return sharding
        return NamedSharding(self.mesh, _spec(sharding))

    def cut(self, sharding: Sharding, shape: Sequence[int]) -> Sharding:
        """Returns `over(sharding)`, cut over the replicas too where an axis allows it.

        Args:
          sharding: in each replica.
          shape: of the value.
        """
        axis = self._axis(sharding, shape)
        if axis is None:
            return self.over(sharding)
        spec = [*_spec(sharding)]
        spec += [None] * (len(shape) - len(spec))
        spec[axis] = REPLICA
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def view(self, array: jax.Array, sharding: Sharding) -> jax.Array:
        """Returns a value that is whole in each replica as one of them has it.

        Args:
          array: on all replicas.
          sharding: of the value in one replica, which this process has a part in.
        """
        if len(self.ranks) == 1:
            return array
        return _on(array.shape, sharding, [array])

    def joined(self, by_replica: Sequence[jax.Array], sharding: Sharding) -> jax.Array:
        """Returns what is whole in each replica as one value on all of them.

        If they are not equal it is no value, but terms that only `reducer` understands.

        Args:
          by_replica: those of the replicas that this process has a part in.
          sharding: of each.
        """
        if len(self.ranks) == 1:
            return by_replica[0]
        return _on(by_replica[0].shape, self.over(sharding), by_replica)

    def reducer(
        self,
        avals: Sequence[jax.ShapeDtypeStruct],
        shardings: Sequence[Sharding],
        is_cut: bool,
    ) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
        """Compiles the sum over the replicas of values that differ between them.

        Args:
          avals: of the values.
          shardings: of each in one replica.
          is_cut: whether the sums are cut over the replicas where an axis allows it.
        """
        pairs = list(zip(avals, shardings, strict=True))
        axes = [self._axis(s, a.shape) if is_cut else None for a, s in pairs]
        given = [self.over(s) for _, s in pairs]
        wanted = [self.cut(s, a.shape) if is_cut else self.over(s) for a, s in pairs]

        def total(terms: list[jax.Array]) -> list[Any]:
            return [_sum(term, axis) for term, axis in zip(terms, axes, strict=True)]

        summed = jax.shard_map(
            total,
            mesh=self.mesh,
            in_specs=([_spec(s) for s in given],),
            out_specs=[_spec(s) for s in wanted],
            check_vma=False,  # that the terms differ is the point
        )
        lowered = jax.jit(summed, donate_argnums=0).lower(
            placing.avals_with(given, avals)
        )
        compiled: Callable[..., list[jax.Array]] = lowered.compile()
        return compiled

    def _axis(self, sharding: Sharding, shape: Sequence[int]) -> int | None:
        """Returns the longest axis that the replicas divide and nothing else cuts."""
        count = len(self.ranks)
        spec = [*_spec(sharding), *[None] * len(shape)]
        free = [
            axis
            for axis, size in enumerate(shape)
            if spec[axis] is None and size and size % count == 0
        ]
        if count == 1 or not free:
            return None
        return max(free, key=lambda axis: shape[axis])


def _sum(term: jax.Array, axis: int | None) -> Any:
    if axis is None:
        return jax.lax.psum(term, REPLICA)
    return jax.lax.psum_scatter(term, REPLICA, scatter_dimension=axis, tiled=True)


def _spec(sharding: Sharding) -> PartitionSpec:
    if isinstance(sharding, NamedSharding):
        return sharding.spec
    return PartitionSpec()


def _on(
    shape: tuple[int, ...], sharding: Sharding, arrays: Sequence[jax.Array]
) -> jax.Array:
    """Returns the buffers of `arrays` on the devices of this process as one array."""
    buffers: Mapping[jax.Device, jax.Array] = {
        shard.device: shard.data
        for array in arrays
        for shard in array.addressable_shards
    }
    devices = sharding.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [buffers[device] for device in devices]
    )
