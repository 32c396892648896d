"""Who runs what: devices to (replica, pipeline rank, place in its mesh). Pure.

Devices are taken in the order of hosts, then processes, so what is numbered next to
each other lies next to each other. Innermost is the mesh of a pipeline rank: it stays
inside a host where the hosts are large enough. Then come the ranks of a pipeline, so
that neighbours are close, and outermost the replicas, which meet once a step.
"""

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

from rrfp_jax.errors import ConfigError


class Spot(NamedTuple):
    """One device of the cluster.

    Attributes:
      host: its name.
      process: the index of the process that drives it.
      number: its position among all devices, ordered by process.
    """

    host: str
    process: int
    number: int


Assignment = tuple[tuple[tuple[Spot, ...], ...], ...]
"""By replica, then pipeline rank: the devices of its mesh."""


def lay_out(
    spots: Sequence[Spot], sizes: Sequence[int], num_replicas: int = 1
) -> tuple[Assignment, list[str]]:
    """Returns which devices form which pipeline rank, and what is doubtful about it.

    Args:
      spots: all devices.
      sizes: the number of devices of each pipeline rank.
      num_replicas: data-parallel copies of the pipeline.

    Raises:
      ConfigError: there are too few devices, or a process would have none to use.
    """
    needed = sum(sizes) * num_replicas
    num_processes = len({spot.process for spot in spots})
    if len(spots) < needed:
        raise ConfigError(
            f"mesh.replicas={num_replicas} x pipeline.num_ranks={len(sizes)} of "
            f"mesh.data x mesh.model = {sizes[0]} devices needs {needed} devices; "
            f"there are {len(spots)}.\n"
            "  Lower one of them, start more processes or, on a CPU, set "
            f"--config.mesh.num_cpu_devices={math.ceil(needed / num_processes)}."
        )
    hosts: dict[str, collections.deque[Spot]] = {}
    for spot in sorted(spots, key=lambda s: (s.process, s.number)):
        hosts.setdefault(spot.host, collections.deque()).append(spot)
    doubts: list[str] = []
    # Leaving devices over at the end of a host is right only if enough remain.
    keeps_together = _room_together(hosts, sizes, num_replicas)
    if not keeps_together:
        doubts.append(
            f"pipeline ranks of {max(sizes)} devices do not fit into hosts of "
            f"{[len(free) for free in hosts.values()]}: some span two hosts, and their "
            "collectives cross the network."
        )
    queue = collections.deque(hosts.values())
    layout = tuple(
        tuple(_take(queue, size, keeps_together) for size in sizes)
        for _ in range(num_replicas)
    )
    used = {spot.process for ranks in layout for rank in ranks for spot in rank}
    idle = sorted({spot.process for spot in spots} - used)
    if idle:
        raise ConfigError(
            f"processes {idle} have nothing to run: {needed} of {len(spots)} devices "
            "are enough.\n  Start fewer processes, or raise --config.mesh.replicas."
        )
    return layout, doubts


def table(layout: Assignment, model_ways: Sequence[int]) -> str:
    """Returns the layout as text: a line a device.

    Args:
      layout: it.
      model_ways: tensor-parallel ways of each pipeline rank.
    """
    lines = ["host          process  device  replica  rank  data  model"]
    for q, ranks in enumerate(layout):
        for r, rank in enumerate(ranks):
            for i, spot in enumerate(rank):
                data, model = divmod(i, model_ways[r])
                lines.append(
                    f"{spot.host:<12}  {spot.process:>7}  {spot.number:>6}  {q:>7}  "
                    f"{r:>4}  {data:>4}  {model:>5}"
                )
    return "\n".join(lines)


def held_by(layout: Assignment, process: int) -> str:
    """Says which pipeline ranks a process has a part of."""
    return ", ".join(
        f"rank {r}" + (f" of replica {q}" if len(layout) > 1 else "")
        for q, ranks in enumerate(layout)
        for r, rank in enumerate(ranks)
        if any(spot.process == process for spot in rank)
    )


def _room_together(
    hosts: dict[str, collections.deque[Spot]], sizes: Sequence[int], num_replicas: int
) -> bool:
    free = collections.deque(map(len, hosts.values()))
    for size in [*sizes] * num_replicas:
        while free and free[0] < size:
            free.popleft()
        if not free:
            return False
        free[0] -= size
    return True


def _take(
    queue: collections.deque[collections.deque[Spot]], size: int, keeps_together: bool
) -> tuple[Spot, ...]:
    while not queue[0] or (keeps_together and len(queue[0]) < size):
        queue.popleft()
    taken: list[Spot] = []
    while len(taken) < size:
        while not queue[0]:
            queue.popleft()
        taken.append(queue[0].popleft())
    return tuple(taken)
