"""Start-up: how the processes of a run find each other, and how each of them ends.

One process needs nothing of this. Several come up through `jax.distributed`, under
SLURM without being told anything, else with an address. Through its key-value store
they exchange where their mail is and which keys seal it; from then on they write
letters.

Two mails a process: one that the training thread reads, and one of the thread that
watches who is alive.

How a process ends when the run fails. Whatever fails first anywhere is the *first
cause*; every process learns it, prints it last, and leaves at once with a status other
than zero, without waiting for anybody (the orderly end of `jax.distributed` would). JAX
itself aborts a process when its coordinator is gone: that, too, waits until the first
cause is known and printed.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import secrets
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from rrfp_jax.coordination import last_words
from rrfp_jax.coordination.desk import Desk
from rrfp_jax.coordination.heartbeat import Heartbeat
from rrfp_jax.coordination.layout import Spot
from rrfp_jax.errors import ConfigError
from rrfp_jax.transport.mail import Address, Mail

_START_TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class Whereabouts:
    """How to join a run of several processes.

    Attributes:
      coordinator: host:port of process 0; empty for what SLURM says, or for a run of
        one process.
      num_processes: all of them; only with an address.
      process_id: which this is, from 0; only with an address.
      peer_timeout_s: how long a process may be silent before it counts as lost.
      stall_timeout_s: how long all processes may wait for each other.

    Raises:
      ConfigError: these do not fit together.
    """

    coordinator: str = ""
    num_processes: int = 0
    process_id: int = -1
    peer_timeout_s: float = 60.0
    stall_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        if self.coordinator and not 0 <= self.process_id < self.num_processes:
            raise ConfigError(
                f"cluster.coordinator={self.coordinator!r} needs cluster.num_processes "
                f"(is {self.num_processes}) and cluster.process_id (is "
                f"{self.process_id}), from 0 up to one less.\n"
                "  Set --config.cluster.num_processes and process_id, or start with "
                "scripts/launch_local.py or srun."
            )
        if not self.coordinator and self.num_processes > 1:
            raise ConfigError(
                f"cluster.num_processes={self.num_processes} without an address.\n"
                "  Set --config.cluster.coordinator to HOST:PORT of process 0."
            )
        for name in ("peer_timeout_s", "stall_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(
                    f"cluster.{name}={getattr(self, name)} is no time.\n"
                    f"  Set --config.cluster.{name} above 0."
                )

    @property
    def has_others(self) -> bool:
        """Whether the run has several processes."""
        return bool(self.coordinator) or _is_slurm_step()

    @property
    def count(self) -> int:
        """How many processes the run has."""
        if self.coordinator:
            return self.num_processes
        return int(os.environ["SLURM_STEP_NUM_TASKS"]) if _is_slurm_step() else 1


@dataclasses.dataclass(eq=False)
class Cluster:
    """The processes of a run, seen from one of them.

    Attributes:
      process: this one.
      num_processes: all of them.
      hosts: the name of each one's host.
      spots: all devices, ordered by process.
      address: of this process's network interface.
      desk: its mail; None in a run of one process.
      heartbeat: watches over the others; None likewise.
      names: what each process holds, for messages; filled in once that is known.
      has_agreed_to_end: whether all processes end now, whatever this one raises.
    """

    process: int = 0
    num_processes: int = 1
    hosts: tuple[str, ...] = ("localhost",)
    spots: tuple[Spot, ...] = ()
    address: str = "127.0.0.1"
    desk: Desk | None = None
    heartbeat: Heartbeat | None = None
    names: dict[int, str] = dataclasses.field(default_factory=dict)
    has_agreed_to_end: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that writes what is written once."""
        return self.process == 0

    def all_gather(self, value: Any) -> list[Any]:
        """Returns what every process gives, in their order; all must call it."""
        if self.desk is None:
            return [value]
        return self.desk.all_gather(value, range(self.num_processes))

    def describe(self, process: int) -> str:
        """Names a process in a message."""
        held = self.names.get(process)
        where = f"{self.hosts[process]}, {held}" if held else self.hosts[process]
        return f"process {process} ({where})"


def devices() -> list[jax.Device]:
    """Returns all devices of the run; a `Spot` says which of them it is."""
    return sorted(jax.devices(), key=lambda d: (d.process_index, d.id))


def alone() -> Cluster:
    """Returns the cluster of a run of one process, on all its devices."""
    return Cluster(spots=_spots(["localhost"]))


@contextlib.contextmanager
def joined(whereabouts: Whereabouts) -> Iterator[Cluster]:
    """Joins a run; leaves it in order, or prints the first cause and exits.

    To be entered before JAX is first used.

    Raises:
      ConfigError: the others cannot be reached, or a device does not work.
    """
    if not whereabouts.has_others:
        yield alone()
        return
    cluster = _join(whereabouts)
    try:
        _verify_devices(cluster.process)
        yield cluster
        _leave(cluster)
    except BaseException as error:
        if cluster.has_agreed_to_end and isinstance(error, SystemExit):
            _leave(cluster)
            raise
        _fail(cluster, error)


def _join(whereabouts: Whereabouts) -> Cluster:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM away from us.
    jax.config.update("jax_enable_preemption_service", False)
    timeout_s = whereabouts.peer_timeout_s
    explicit: dict[str, Any] = {}
    if whereabouts.coordinator:
        explicit = {
            "coordinator_address": whereabouts.coordinator,
            "num_processes": whereabouts.num_processes,
            "process_id": whereabouts.process_id,
        }
    try:
        jax.distributed.initialize(
            **explicit,
            initialization_timeout=_START_TIMEOUT_S,
            # Ours sees more, and says more: it is to be the first to speak.
            heartbeat_timeout_seconds=max(100, round(10 * timeout_s)),
            shutdown_timeout_seconds=max(1, round(timeout_s)),
        )
    except RuntimeError as error:
        raise ConfigError(
            f"this process cannot join the run ({whereabouts}): {error}.\n"
            "  Start all processes, and check that process 0 can be reached."
        ) from error
    process, count = jax.process_index(), jax.process_count()
    store = _Store(process, count)
    run_id = store.said_by_first("run", secrets.token_hex(8))
    host = _own_address(store.coordinator)
    letters, beats = Mail(process, run_id, host), Mail(process, run_id, host)
    mine = json.dumps([_host_name(), letters.address, beats.address])
    cards = [json.loads(card) for card in store.exchanged("card", mine)]
    hosts = tuple(card[0] for card in cards)
    letters.introduce([Address(*card[1]) for card in cards])
    beats.introduce([Address(*card[2]) for card in cards])
    cluster = Cluster(process, count, hosts, _spots(hosts), host)
    heartbeat = Heartbeat(
        process,
        count,
        beats,
        cluster.describe,
        timeout_s,
        whereabouts.stall_timeout_s,
        on_fatal=functools.partial(last_words.leave, status=1),
    )
    cluster.heartbeat = heartbeat
    cluster.desk = Desk(
        process, letters, heartbeat.check, heartbeat.progress, timeout_s
    )
    heartbeat.start()
    last_words.on_abort(lambda: heartbeat.report(RuntimeError(_ABORTED), ""))
    return cluster


# As `verdict.is_consequence` knows what follows from another's end.
_ABORTED = "UNAVAILABLE: JAX has ended this process; its message is above"


def _leave(cluster: Cluster) -> None:
    """Ends the run when all are at its end."""
    cluster.all_gather(None)
    assert cluster.heartbeat is not None
    assert cluster.desk is not None
    jax.distributed.shutdown()  # waits for all, and so while they are watched over
    cluster.heartbeat.stop()
    cluster.desk.mail.close()


def _fail(cluster: Cluster, error: BaseException) -> NoReturn:
    """Prints what went wrong here, then the first cause of all, and exits."""
    assert cluster.heartbeat is not None
    with contextlib.suppress(OSError):  # as where the disk of the log is full
        if isinstance(error, ConfigError):
            sys.stderr.write(f"ConfigError: {error}\n")
        elif not isinstance(error, SystemExit | KeyboardInterrupt):
            traceback.print_exception(error)
    text = cluster.heartbeat.report(error, _where(error))
    last_words.leave(text, _status(error))


def _where(error: BaseException) -> str:
    """Returns what the runtime has noted on an error; the numbers of tasks in words."""
    notes = getattr(error, "__notes__", ())
    ours = [note for note in notes if "\n" not in note]  # JAX's has several lines
    task = r"\b(\d+)[FBW](\d+) on rank \d+"
    return re.sub(task, r"\g<0> (stage \1, microbatch \2)", ", ".join(ours))


def _status(error: BaseException) -> int:
    match error:
        case ConfigError():
            return 2
        case KeyboardInterrupt():
            return 130
        case SystemExit(code=int(code)):
            return code
    return 1


class _Store:
    """The key-value store of `jax.distributed`, for which JAX has no public name."""

    def __init__(self, process: int, count: int) -> None:
        from jax._src import distributed

        state = distributed.global_state
        self._client: Any = state.client
        self._process, self._count = process, count
        self.coordinator = str(state.coordinator_address)

    def said_by_first(self, key: str, value: str) -> str:
        """Returns what process 0 gives."""
        if self._process == 0:
            self._client.key_value_set(f"rrfp_jax/{key}", value)
        return self._get(f"rrfp_jax/{key}")

    def exchanged(self, key: str, value: str) -> list[str]:
        """Returns what each process gives, in their order."""
        self._client.key_value_set(f"rrfp_jax/{key}/{self._process}", value)
        return [self._get(f"rrfp_jax/{key}/{p}") for p in range(self._count)]

    def _get(self, key: str) -> str:
        found: str = self._client.blocking_key_value_get(key, _START_TIMEOUT_S * 1000)
        return found


def _is_slurm_step() -> bool:
    """Whether `srun` has started this process beside others."""
    return (
        "SLURM_STEP_NODELIST" in os.environ
        and "SLURM_PROCID" in os.environ
        and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    )


def _host_name() -> str:
    """Returns the name of this host; SLURM's name of the node where there is one."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def _own_address(coordinator: str) -> str:
    """Returns the address of this host's interface towards the coordinator."""
    host, _, port = coordinator.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host.strip("[]"), int(port)))  # sends nothing
        found: str = probe.getsockname()[0]
    return found


def _spots(hosts: Sequence[str]) -> tuple[Spot, ...]:
    return tuple(
        Spot(hosts[device.process_index], device.process_index, number)
        for number, device in enumerate(devices())
    )


def _verify_devices(process: int) -> None:
    """Reads back a value from each device.

    Under SLURM, isolation of GPUs by cgroups has made copies return zeros, silently.
    """
    for device in jax.local_devices():
        value = np.arange(1, 5, dtype=np.float32) + process
        if not np.array_equal(jax.device_put(value, device), value):
            raise ConfigError(
                f"{device} of process {process} does not return what was put on it.\n"
                "  Look at how the devices are made visible (cgroups, "
                "CUDA_VISIBLE_DEVICES, --gpu-bind)."
            )
