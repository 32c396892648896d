"""The processes of one run, each with a log of its own, for those who disturb them.

Where `launch_local` starts a run and waits for it, this starts one and lets its user
do to single processes whatever happens in the field; and says when each has ended, how,
and what it said last. Whatever happens to its user, no process is left.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
import orbax.checkpoint as ocp

from scripts import launch_local

_PAUSE_S = 0.02  # between looks at the processes


class End(NamedTuple):
    """How a process ended."""

    status: int  # as of `subprocess`: minus the signal that killed it
    time_s: float  # on `time.monotonic`


class Fleet:
    """A run of `rrfp_jax.main`, or of a script in its place.

    A context manager: leaving it kills what is left.

    Args:
      start: of the command, after `python`: ["-m", "rrfp_jax.main"].
      arguments: of all processes.
      num_processes: how many.
      logs: a folder for their logs, by number; what is there is continued.
      own: further arguments of single processes.
      env: added to the environment of all.
    """

    def __init__(
        self,
        start: Sequence[str],
        arguments: Sequence[str],
        num_processes: int,
        logs: pathlib.Path,
        own: dict[int, Sequence[str]] | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs = [logs / f"{i}.log" for i in range(num_processes)]
        self._begins = [p.stat().st_size if p.exists() else 0 for p in self._logs]
        commands, envs = launch_local.cluster_commands(
            [sys.executable, *start, *arguments], num_processes
        )
        self._popens: list[subprocess.Popen[bytes]] = []
        self.ends: dict[int, End] = {}
        for i, command in enumerate(commands):
            with self._logs[i].open("ab") as log:
                popen = subprocess.Popen(
                    [*launch_local.tether(), *command, *(own or {}).get(i, ())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **envs[i], **(env or {})},
                    cwd=pathlib.Path(__file__).parents[1],
                    process_group=0,
                )
            self._popens.append(popen)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def signal(self, number: int, *processes: int) -> None:
        """Sends a signal to some processes, or to all that run."""
        for i in processes or self.running():
            self._popens[i].send_signal(number)

    def running(self) -> list[int]:
        """Returns who has not ended; notes who has."""
        for i, popen in enumerate(self._popens):
            if i not in self.ends and popen.poll() is not None:
                self.ends[i] = End(popen.returncode, time.monotonic())
        return [i for i in range(len(self._popens)) if i not in self.ends]

    def wait(self, timeout_s: float, but: Sequence[int] = ()) -> bool:
        """Waits until all but some have ended; returns whether they have."""
        return self.until(lambda: not set(self.running()) - set(but), timeout_s)

    def until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Waits until something is true; returns whether it has become so in time."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline_s:
                return False
            self.running()  # so that ends are noted when they happen
            time.sleep(_PAUSE_S)
        return True

    def log(self, process: int) -> str:
        """Returns what a process has printed since this run of it began."""
        with self._logs[process].open("rb") as file:
            file.seek(self._begins[process])
            return file.read().decode(errors="replace")

    def last_line(self, process: int) -> str:
        """Returns the last line of a process's log; empty without one."""
        return (self.log(process).rstrip("\n").splitlines() or [""])[-1]

    def tails(self) -> str:
        """Returns how each has ended, and the end of its log, for a message."""
        return "\n".join(
            f"--- process {i}, {self.ends.get(i, 'running')}:\n{self.log(i)[-2000:]}"
            for i in range(len(self._logs))
        )

    def num_left(self) -> int:
        """Returns how many ended processes have left children behind."""
        return sum(_is_group(self._popens[i].pid) for i in self.ends)

    def kill(self) -> None:
        """Kills all that run, and whatever they have started."""
        for popen in self._popens:
            if _is_group(popen.pid):
                os.killpg(popen.pid, signal.SIGKILL)
        for popen in self._popens:
            popen.wait()
        self.running()


def _is_group(number: int) -> bool:
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def steps(workdir: pathlib.Path) -> list[int]:
    """Returns the training steps in the metrics of a run."""
    path = workdir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1].splitlines()
    return [line["step"] for line in map(json.loads, whole) if "loss" in line]


def checkpoints(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints of a run, ascending, after reading all."""
    folder = workdir.absolute() / "checkpoints"
    found = sorted(int(x.name) for x in folder.glob("*") if x.name.isdigit())
    for step in found:
        meta, _ = read_checkpoint(workdir, step)
        if meta["step"] != step:
            raise ValueError(f"{folder / str(step)} says that it is of {meta['step']}.")
    return found


def read_checkpoint(
    workdir: pathlib.Path, step: int
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Returns what a checkpoint says, and its arrays: what, then layer, then a tree.

    Raises:
      ValueError: a layer is missing; and whatever orbax raises of a broken part.
    """
    folder = workdir.absolute() / "checkpoints" / str(step)
    meta = json.loads((folder / "meta.json").read_text())
    arrays: dict[str, dict[str, Any]] = {"params": {}, "optimizer": {}}
    with ocp.PyTreeCheckpointer() as reader:
        for number in sorted(set(meta["parts"].values())):
            part = folder / f"part_{number}"
            there = reader.metadata(part).item_metadata.tree
            plain = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), there)
            for what, layers in reader.restore(part, restore_args=plain).items():
                arrays[what] |= layers
    missing = set(meta["parts"]) - set(arrays["params"])
    if missing:
        raise ValueError(f"{folder} lacks the layers {sorted(missing)}.")
    return meta, arrays
