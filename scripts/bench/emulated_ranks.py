"""The ranks of an emulated pipeline and what connects them, over several processes."""

from rrfp_jax.coordination import layout
from rrfp_jax.coordination.cluster import Cluster, devices
from rrfp_jax.runtime import placing, wire


def connected(
    cluster: Cluster, num_ranks: int, model: int
) -> tuple[list[placing.RankMesh], wire.Wire | None]:
    """Returns the ranks, and the wire to the other processes; None without others.

    Args:
      cluster: all processes.
      num_ranks: pipeline ranks.
      model: devices of each, consecutive ones.
    """
    (spots,), _ = layout.lay_out(cluster.spots, [model] * num_ranks)
    all_devices = devices()
    ranks = [
        placing.mesh_of([all_devices[spot.number] for spot in rank], 1, model)
        for rank in spots
    ]
    if cluster.desk is None:
        return ranks, None
    return ranks, wire.connect(cluster.desk, 0, ranks, wire.Way())
