"""Starts a system on a job, and puts together what its processes say."""

import contextlib
import dataclasses
import json
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from scripts import launch_local
from scripts.peers import network
from scripts.peers.registry import System
from third_party import peer_job
from third_party.peer_job import Job

_GRACE_S = 5.0  # for the others, once a process has failed


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a system.

    Attributes:
      setting, seed: of its durations.
      seconds: from when the first rank began to when the last task ended.
      peak_in_flight: microbatches, by rank.
      gradient_error: the largest of any rank, see `peer_job.error`.
    """

    setting: str
    seed: int
    seconds: float
    peak_in_flight: tuple[int, ...]
    gradient_error: float


@dataclasses.dataclass(frozen=True)
class Result:
    """What a system made of a schedule.

    Attributes:
      peer, version, schedule: what ran.
      steps: those that count.
      reason: why it did not run, or must not count; empty if it did and does.
    """

    peer: str
    version: str
    schedule: str
    steps: tuple[Step, ...] = ()
    reason: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it counts."""
        return not self.reason


def run(system: System, job: Job, link_bytes_per_s: float = 0.0) -> list[Result]:
    """Runs a job, one process a rank or one for all, and waits for its end.

    Args:
      system: that runs it.
      job: what to run.
      link_bytes_per_s: that each rank can send; 0 for what this machine can.

    Returns:
      A result for each schedule of the job.
    """
    count = 1 if system.is_one_process else job.num_ranks
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        hosts = None
        if link_bytes_per_s:
            hosts = stack.enter_context(network.made(count, link_bytes_per_s))
        given = pathlib.Path(folder, "job.json")
        peer_job.write(job, given)
        paths = [pathlib.Path(folder, f"{i}.json") for i in range(count)]
        command = [str(system.python), str(system.driver), str(given)]
        address = launch_local.free_address() if hosts is None else hosts.meeting
        places = [[]] if count == 1 else [[str(i), address] for i in range(count)]
        commands = [
            [*command, str(p), *at] for p, at in zip(paths, places, strict=True)
        ]
        env = dict(system.env)
        if hosts is not None:
            commands = [hosts.command(i, each) for i, each in enumerate(commands)]
            env |= {"GLOO_SOCKET_IFNAME": network.INTERFACE}
        log = pathlib.Path(folder, "log")
        with log.open("wb") as stream:
            launch_local.launch(
                commands,
                [env] * count,
                grace_s=_GRACE_S,
                out=stream,
            )
        reports = [json.loads(p.read_text()) for p in paths if p.exists()]
        return together(system, job, reports, count, log.read_text(errors="replace"))


def together(
    system: System, job: Job, reports: Sequence[Mapping[str, Any]], count: int, log: str
) -> list[Result]:
    """Returns the results of a job's schedules.

    Args:
      system: that ran.
      job: what it was told.
      reports: of the processes that have written one.
      count: of all processes.
      log: what they printed.
    """
    version = reports[0]["version"] if reports else ""
    found = []
    for name in job.schedules:
        parts = [
            each["iterations"]
            for report in reports
            for each in report["schedules"]
            if each["schedule"] == name
        ]
        if len(parts) < count:
            result = Result(system.name, version, name, reason=_last_words(log))
        else:
            steps = tuple(_step(each) for each in zip(*parts, strict=True))
            reason = _judged(steps)
            result = Result(system.name, version, name, steps, reason)
        found.append(result)
    return found


def _step(parts: Sequence[Mapping[str, Any]]) -> Step:
    """Returns a step from what the processes saw of it, on one clock."""
    peaks = {int(r): n for each in parts for r, n in each["peak_in_flight"].items()}
    begin_s = min(each["begin_s"] for each in parts)
    return Step(
        setting=parts[0]["setting"],
        seed=parts[0]["seed"],
        seconds=max(each["end_s"] for each in parts) - begin_s,
        peak_in_flight=tuple(peaks[rank] for rank in sorted(peaks)),
        gradient_error=max(each["gradient_error"] for each in parts),
    )


def _judged(steps: Sequence[Step]) -> str:
    worst = max(step.gradient_error for step in steps)
    if worst <= peer_job.TOLERANCE:
        return ""
    return f"its gradients are off by {worst:.1e}, more than {peer_job.TOLERANCE:.0e}"


def _last_words(log: str) -> str:
    """Returns what says best why processes ended: the first error, or the last line."""
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error: " in line or "Timeout (" in line]
    return (errors or lines[-1:] or ["it ended without a word"])[0].strip()
