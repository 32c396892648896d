"""What ties the processes of one pipeline together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rrfp_jax.coordination.desk import Desk
from rrfp_jax.coordination.groups import Groups
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.transport.cross_process import CrossProcess
from rrfp_jax.transport.pulls import Pulls


@dataclasses.dataclass(frozen=True)
class Way:
    """How payloads go from process to process.

    Attributes:
      pulls: the transfer library; None for everything through the host.
      host_limit_bytes: what goes through the host all the same, up to so many bytes for
        each receiving process.
      max_pulls: payloads of an edge that are pulled ahead.
    """

    pulls: Pulls | None = None
    host_limit_bytes: int = 0
    max_pulls: int = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Wire:
    """The connections of a process to the others of its pipeline.

    Attributes:
      desk: the mail of the process.
      processes: those that drive a device of the pipeline, ascending.
      transport: of payloads.
      groups: of the ranks that span several processes.
    """

    desk: Desk
    processes: tuple[int, ...]
    transport: CrossProcess
    groups: Groups

    def all_gather(self, value: Any) -> list[Any]:
        """Returns what each process of the pipeline gives, ascending."""
        return self.desk.all_gather(value, self.processes)


def connect(
    desk: Desk,
    pipeline: int,
    ranks: Sequence[RankMesh],
    way: Way,
) -> Wire:
    """Returns the wire of a pipeline.

    Args:
      desk: the mail of this process.
      pipeline: its number, the same in all its processes; several may share a process.
      ranks: its ranks, all of them.
      way: how payloads go.
    """
    transport = CrossProcess(
        desk.mail,
        kind := f"payload {pipeline}",
        way.pulls,
        way.host_limit_bytes,
        way.max_pulls,
    )
    desk.handle(kind, transport.on_letter)
    members = [rank.processes for rank in ranks]
    kind = f"proposal {pipeline}"
    groups = Groups(desk.mail, kind, desk.process, members)
    desk.handle(kind, groups.on_letter)
    processes = tuple(sorted({process for each in members for process in each}))
    return Wire(desk, processes, transport, groups)
