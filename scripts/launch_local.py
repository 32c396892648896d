"""Runs a command as several processes on this machine, as one run.

    python scripts/launch_local.py --num_processes=4 -- --config=FILE.py --workdir=DIR

starts `python -m rrfp_jax.main` four times with what follows `--` and with where each
finds the others (--config.cluster.…). Every line that a process prints is printed with
its number in front. SIGINT and SIGTERM go to all. It ends when all have ended, with the
status of the one that failed first.

Nothing that it starts outlives it. Once a process has failed, or a signal has come, the
others have `--grace_s` to end; then they are killed. Children of theirs that are left
are killed too. And should the launcher itself be killed, Linux kills the processes (see
`_TETHER`). Only Linux can do that.

`launch` is for tests and benchmarks too: it starts any commands.
"""

import argparse
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import IO

GRACE_S = 90.0  # more than the peer_timeout_s + 5 s in which a run ends by itself

# Runs in each process before the command: has Linux send it SIGKILL when the launcher
# ends, however that ends. A pipe that it would have to watch needs its help, and a
# group or a session outlives its leader. A process of its own, not a `preexec_fn`:
# forking Python where JAX has threads can deadlock. PR_SET_PDEATHSIG is 1; should the
# launcher have ended before, nobody would send anything.
_TETHER = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def tether() -> list[str]:
    """Returns what to put before a command, so that it ends when this thread does."""
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid())]


class _Process:
    """One of the processes: its pidfd and its output."""

    def __init__(
        self,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str],
        out: IO[bytes],
    ) -> None:
        self._popen = subprocess.Popen(
            [*tether(), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **env},
            process_group=0,  # a terminal's Ctrl-C reaches it through us, once
        )
        assert self._popen.stdout is not None
        self.number, self.stdout = number, self._popen.stdout
        self.pidfd = os.pidfd_open(self._popen.pid)
        self._out, self._partial = out, b""

    def read(self) -> bool:
        """Prints the lines that are here; returns whether more can come."""
        text = os.read(self.stdout.fileno(), 1 << 16)
        *lines, self._partial = (self._partial + text).split(b"\n")
        if not text and self._partial:
            lines.append(self._partial)
            self._partial = b""
        for line in lines:
            self._out.write(b"[%d] %s\n" % (self.number, line))
        self._out.flush()
        return bool(text)

    def signal(self, number: int) -> None:
        """Sends a signal to the process alone; its children are its own concern."""
        # Not by `Popen`, which may wait for it, and then its group has no name.
        signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> None:
        """Kills it, and its children that are left; before it is waited for."""
        os.killpg(self._popen.pid, signal.SIGKILL)

    def finish(self) -> int:
        """Ends what is left of one that has ended; returns its status, or -signal."""
        self.kill()
        status = self._popen.wait()
        os.close(self.pidfd)
        return status


class _Launch:
    """All processes of a run."""

    def __init__(self, grace_s: float, out: IO[bytes]) -> None:
        self._grace_s, self._out = grace_s, out
        self._running: dict[int, _Process] = {}  # by pidfd; none was waited for
        self._received: list[int] = []  # signals
        self._deadline_s: float | None = None  # when those that run are killed
        self._status = 0
        self._verdict = ""

    def run(
        self, commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]]
    ) -> int:
        with selectors.DefaultSelector() as selector:
            try:
                for i, (command, env) in enumerate(zip(commands, envs, strict=True)):
                    process = _Process(i, command, env, self._out)
                    self._running[process.pidfd] = process
                    for number in self._received:  # before it was there
                        process.signal(number)
                    selector.register(process.pidfd, selectors.EVENT_READ, None)
                    selector.register(process.stdout, selectors.EVENT_READ, process)
                while self._running:
                    # A look now and then: a signal may set the deadline meanwhile.
                    for key, _ in selector.select(timeout=0.2):
                        self._attend(selector, key)
                    if self._deadline_s is not None:
                        self._enforce(self._deadline_s)
                while ready := selector.select(timeout=0):  # their last words
                    for key, _ in ready:
                        self._attend(selector, key)
            finally:
                while self._running:
                    self._running.popitem()[1].finish()
        if self._verdict:
            self._say(self._verdict)
        return self._status

    def forward(self, number: int, _: FrameType | None) -> None:
        """Passes a signal on to all."""
        self._received.append(number)
        for process in [*self._running.values()]:
            process.signal(number)
        self._start_grace()

    def _attend(
        self, selector: selectors.BaseSelector, key: selectors.SelectorKey
    ) -> None:
        if key.data is not None:
            if not key.data.read():
                selector.unregister(key.fileobj)
                key.data.stdout.close()
            return
        selector.unregister(key.fileobj)
        process = self._running.pop(key.fd)
        status = process.finish()
        if status:
            how = f"ended with status {status}"
            if status < 0:
                how = f"was killed by {signal.Signals(-status).name}"
            self._say(f"process {process.number} {how}.")
            if not self._status:
                self._status = 128 - status if status < 0 else status
                self._verdict = f"process {process.number} failed first: it {how}."
            self._start_grace()

    def _start_grace(self) -> None:
        if self._deadline_s is None:
            self._deadline_s = time.monotonic() + self._grace_s

    def _enforce(self, deadline_s: float) -> None:
        if self._running and time.monotonic() > deadline_s:
            late = ", ".join(str(p.number) for p in self._running.values())
            self._say(f"killing {late}, still there {self._grace_s:g} s later.")
            for process in self._running.values():
                process.kill()
            self._deadline_s = float("inf")

    def _say(self, text: str) -> None:
        self._out.write(f"launch_local: {text}\n".encode())
        self._out.flush()


def launch(
    commands: Sequence[Sequence[str]],
    envs: Sequence[Mapping[str, str]] | None = None,
    *,
    grace_s: float = GRACE_S,
    out: IO[bytes] | None = None,
) -> int:
    """Runs all commands at once, to their end.

    In the main thread, SIGINT and SIGTERM are passed on to them meanwhile. In any, they
    are killed when that thread ends.

    Args:
      commands: one a process.
      envs: what to add to the environment of each.
      grace_s: how long others may go on after a failure or a signal.
      out: where lines go; standard output by default.

    Returns:
      0, or the first status that was not, by order of ending; 128 + N for signal N.
    """
    run = _Launch(grace_s, sys.stdout.buffer if out is None else out)
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            before[number] = signal.signal(number, run.forward)
        except ValueError:  # not the main thread, to which signals go
            break
    try:
        return run.run(commands, envs or [{}] * len(commands))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def free_address() -> str:
    """Returns HOST:PORT of a port that is free now, and most likely soon after."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


def cluster_commands(
    command: Sequence[str], num_processes: int, devices_each: int = 0
) -> tuple[list[list[str]], list[dict[str, str]]]:
    """Returns the commands and environments of the processes of one run.

    Args:
      command: of each, without the settings of the cluster.
      num_processes: of the run.
      devices_each: GPUs that a process gets, in order; 0 leaves it all that it sees.
    """
    address = free_address()
    # JAX's coordinator asks nobody who they are; else it would listen to every host.
    common = {"JAX_COORDINATOR_BIND_ADDRESS": address}
    commands, envs = [], []
    for i in range(num_processes):
        settings = {"coordinator": address, "num_processes": num_processes}
        settings["process_id"] = i
        flags = [f"--config.cluster.{key}={value}" for key, value in settings.items()]
        commands.append([*command, *flags])
        devices = map(str, range(i * devices_each, (i + 1) * devices_each))
        own = {"JAX_LOCAL_DEVICE_IDS": ",".join(devices)} if devices_each else {}
        envs.append({**common, **own})
    return commands, envs


def main() -> None:
    """Reads the command line and launches."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num_processes", type=int, required=True)
    parser.add_argument("--gpus_per_process", type=int, default=0, help="0: all, each")
    parser.add_argument("--grace_s", type=float, default=GRACE_S)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--module", default="rrfp_jax.main", help="to run instead")
    what.add_argument("--script", help="path of a script to run instead")
    parser.add_argument("arguments", nargs="*", help="of the command, after --")
    args = parser.parse_args()
    if args.num_processes < 1:
        parser.error(f"--num_processes={args.num_processes}: give 1 or more.")
    start = [args.script] if args.script else ["-m", args.module]
    commands, envs = cluster_commands(
        [sys.executable, *start, *args.arguments],
        args.num_processes,
        args.gpus_per_process,
    )
    sys.exit(launch(commands, envs, grace_s=args.grace_s))


if __name__ == "__main__":
    main()
