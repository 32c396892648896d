"""Runs each check in a process of its own.

So one that fails, hangs, or is killed by its library costs the others nothing, what it
has told stays, and its device memory is free for the next.
"""

import contextlib
import dataclasses
import importlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import jax

from scripts.gpu.figures import Failure, Figure
from scripts.gpu.sizes import Size

# Where each check is, and its share of the time. The quick ones come first: what they
# save is for the others. The last one uses most that may not work on a machine.
CHECKS = {
    "host": ("scripts.gpu.host", "check", 0.08),
    "copies": ("scripts.gpu.transfers", "check_copies", 0.04),
    "pulls": ("scripts.gpu.transfers", "check_pulls", 0.06),
    "layer": ("scripts.gpu.layer", "check", 0.2),
    "orders": ("scripts.gpu.orders", "check", 0.16),
    "gradients": ("scripts.gpu.gradients", "check", 0.36),
    "processes": ("scripts.gpu.transfers", "check_processes", 0.1),
}
_END_S = 10.0  # that an orderly end may take


@dataclasses.dataclass(frozen=True)
class Machine:
    """What JAX sees.

    Attributes:
      backend: such as "cpu" or "gpu".
      kind: of the first device.
      num_devices: of this process.
      memory_gib: that JAX may have on the first one; None where it does not say.
      jax_version: of it.
    """

    backend: str
    kind: str
    num_devices: int
    memory_gib: float | None
    jax_version: str

    def __str__(self) -> str:
        """One line."""
        memory = "" if self.memory_gib is None else f", {self.memory_gib:.0f} GiB"
        return (
            f"{self.num_devices} x {self.kind} ({self.backend}{memory}), "
            f"jax {self.jax_version}"
        )


def machine(limit_s: float) -> Machine | Failure:
    """Looks at the machine, in a process of its own."""
    found: list[Any] = list(_told(_machine, (), limit_s))
    return found[0]


def checked(check: str, size: Size, limit_s: float) -> Iterator[Figure | Failure | str]:
    """Yields what a check finds, as it finds it, and what it is about to do.

    Args:
      check: its name.
      size: of it.
      limit_s: after which it is ended.
    """
    yield from _told(_check, (check, size), limit_s)


def _told(
    run: Callable[..., Iterator[Any]], arguments: tuple[Any, ...], limit_s: float
) -> Iterator[Any]:
    """Yields what `run` yields in a new process; a failure at the end, if it fails."""
    ends_s = time.monotonic() + limit_s
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(there, run, arguments))
    process.start()
    there.close()
    try:
        while True:
            if not here.poll(max(0.0, ends_s - time.monotonic())):
                yield Failure(f"took longer than its {limit_s:.0f} s")
                return
            message = here.recv()
            if message is None:
                process.join(_END_S)
                return
            yield message
    except EOFError:
        process.join(_END_S)
        yield Failure(f"its process ended with status {process.exitcode}")
    finally:
        # Itself and what it has started, which is of its process group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()


def _work(there: Any, run: Callable[..., Iterator[Any]], arguments: Any) -> None:
    os.setpgid(0, 0)
    try:
        for message in run(*arguments):
            there.send(message)
    except Exception as error:
        traceback.print_exc()
        reason = str(error).strip().partition("\n")[0]
        there.send(Failure(f"{type(error).__name__}: {reason}"))
    there.send(None)


def _machine() -> Iterator[Machine]:
    devices = jax.local_devices()
    limit = (devices[0].memory_stats() or {}).get("bytes_limit")
    yield Machine(
        backend=jax.default_backend(),
        kind=devices[0].device_kind,
        num_devices=len(devices),
        memory_gib=None if limit is None else limit / 2**30,
        jax_version=jax.__version__,
    )


def _check(name: str, size: Size) -> Iterator[Figure | str]:
    module, function, _ = CHECKS[name]
    yield from getattr(importlib.import_module(module), function)(size)
