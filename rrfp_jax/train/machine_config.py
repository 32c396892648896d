"""On which devices and processes a run is."""

import dataclasses

from rrfp_jax.coordination.cluster import Whereabouts
from rrfp_jax.errors import check_at_least, check_choice


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """The devices of one pipeline rank, and how many pipelines there are.

    Attributes:
      data: data-parallel ways within a rank; a microbatch's rows are cut over them.
      model: tensor-parallel ways.
      vision_model: tensor-parallel ways of ranks with stages of the vision tower only;
        0 for as many as of the others.
      replicas: pipelines, each with its own microbatches; their gradients are reduced
        once a step.
      num_cpu_devices: how many devices a CPU shows to each process; 0 for as many as
        are needed.
    """

    data: int = 1
    model: int = 1
    vision_model: int = 0
    replicas: int = 1
    num_cpu_devices: int = 0

    def __post_init__(self) -> None:
        check_at_least("mesh", self, data=1, model=1, num_cpu_devices=0)
        check_at_least("mesh", self, vision_model=0, replicas=1)


WAYS = ("auto", "host", "transfer")


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """The processes of the run; none of it changes what is computed.

    Attributes:
      coordinator: HOST:PORT of process 0; empty for one process, or for what SLURM
        says.
      num_processes: all of them, where there is a coordinator.
      process_id: which this is, likewise.
      peer_timeout_s: how long a process may be silent before it counts as lost.
      stall_timeout_s: how long all processes may wait for each other.
      payloads: how activations and cotangents go from process to process: all through
        the `host`; by the `transfer` library, but for what is small; or `auto`, which
        is the same on CPUs, and on accelerators all by the library.
      host_limit_kib: what is small: up to so many KiB for each receiving process. On
        CPUs both ways are as fast at about this size (docs/clusters.md has the
        figures).
    """

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1
    peer_timeout_s: float = Whereabouts.peer_timeout_s
    stall_timeout_s: float = Whereabouts.stall_timeout_s
    payloads: str = "auto"
    host_limit_kib: int = 256

    def __post_init__(self) -> None:
        check_choice("cluster.payloads", self.payloads, WAYS)
        check_at_least("cluster", self, host_limit_kib=0)
        _ = self.whereabouts  # checks its values

    @property
    def whereabouts(self) -> Whereabouts:
        """How to join."""
        return Whereabouts(
            self.coordinator,
            self.num_processes,
            self.process_id,
            self.peer_timeout_s,
            self.stall_timeout_s,
        )
