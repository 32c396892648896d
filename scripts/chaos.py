"""Kills, freezes and slows processes of a training run, again and again.

    python scripts/chaos.py --trials=20 --seed=0 --json=chaos.json

Each trial starts the same run, in the same work directory: so it goes on from the
newest checkpoint, whatever the trial before has done. At a random moment, counted from
when the processes have joined (which the log of process 0 tells) or from the first step
of the trial, something happens to a random process:

    kill   SIGKILL: every other process ends within --peer_timeout_s + 5 s, not with
           status 0, and names the process in its last line.
    stop   SIGSTOP: the same; the stopped one is killed in the end.
    slow   SIGSTOP and SIGCONT in turn, for a few seconds: the run goes on. Then
           SIGTERM to one process ends all, with 0 and with a checkpoint.

After each trial every checkpoint is read, and no process may be left. Last, the run is
continued without a disturbance.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from scripts import fleet as fleet_lib
from scripts.fleet import Fleet

_SLACK_S = 5.0  # beyond --peer_timeout_s
_PATIENCE_S = 180.0  # until a run has joined, or makes a step
_SLOW_S = 4.0
_MANY_STEPS = 1_000_000


@dataclasses.dataclass
class Trial:
    """What was done and what came of it.

    Attributes:
      number: from 0.
      what: kill, stop, slow, or nothing.
      victim: the process it was done to; -1 for none.
      since: what the moment was counted from: joined, or step.
      after_s: how long after that.
      step: the last in the metrics when it was done.
      exit_s: from then until the last of the others has ended.
      checkpoint: the newest, when all had ended.
      leaked: how many processes have left others behind.
      faults: what is not as it must be; none is a clean exit.
    """

    number: int
    what: str
    victim: int = -1
    since: str = "joined"
    after_s: float = 0.0
    step: int = 0
    exit_s: float = 0.0
    checkpoint: int = 0
    leaked: int = 0
    faults: list[str] = dataclasses.field(default_factory=list)

    def row(self) -> str:
        """Returns it as a line of the table."""
        found = "; ".join(self.faults) or "clean"
        victim = "-" if self.victim < 0 else str(self.victim)
        return (
            f"{self.number:>5}  {self.what:<7}  {victim:>7}  {self.since:<6}  "
            f"{self.after_s:>7.2f}  {self.step:>6}  {self.exit_s:>6.2f}  "
            f"{self.checkpoint:>10}  {found}"
        )


_HEADER = "trial  what      victim  since   after_s    step  exit_s  checkpoint  found"


class Chaos:
    """The trials on one work directory.

    Args:
      args: of the command line.
      workdir: new.
    """

    def __init__(self, args: argparse.Namespace, workdir: pathlib.Path) -> None:
        self._args = args
        self._workdir = workdir
        self._random = random.Random(args.seed)

    def trial(self, number: int) -> Trial:
        """Runs one; a disturbance and a victim drawn at random."""
        what = self._random.choice(self._args.what)
        victim = self._random.randrange(self._args.num_processes)
        since = self._random.choice(["joined", "step"])
        after_s = self._random.uniform(0, self._args.window_s)
        trial = Trial(number, what, victim, since, after_s)
        return self._observed(trial, self._disturb)

    def undisturbed(self, number: int) -> Trial:
        """Continues the run, for a few steps."""
        return self._observed(Trial(number, "nothing"), self._continue)

    def _observed(self, trial: Trial, act: Callable[[Fleet, Trial], None]) -> Trial:
        command = [
            f"--config={self._args.config}",
            f"--workdir={self._workdir}",
            f"--config.cluster.peer_timeout_s={self._args.peer_timeout_s}",
            f"--config.train.num_steps={_MANY_STEPS}",
            "--config.train.checkpoint_every=5",
            "--config.train.trace_step=0",
            *self._args.arguments,
        ]
        start, logs = ["-m", "rrfp_jax.main"], self._workdir / "logs"
        with Fleet(start, command, self._args.num_processes, logs) as fleet:
            if not fleet.until(lambda: "who runs what" in fleet.log(0), _PATIENCE_S):
                trial.faults.append("the processes have not joined")
            else:
                act(fleet, trial)
            trial.leaked = fleet.num_left()
            if trial.faults:
                print(fleet.tails(), file=sys.stderr, flush=True)
        if trial.leaked:
            trial.faults.append(f"{trial.leaked} have left processes behind")
        try:
            found = fleet_lib.checkpoints(self._workdir)
            trial.checkpoint = max(found, default=0)
        except Exception as error:
            trial.faults.append(f"a checkpoint is broken: {error}")
        return trial

    def _disturb(self, fleet: Fleet, trial: Trial) -> None:
        before = self._step()
        if trial.since == "step":
            fleet.until(lambda: self._step() > before or bool(fleet.ends), _PATIENCE_S)
        began_s = time.monotonic()
        if fleet.until(lambda: len(fleet.ends) > 0, trial.after_s):
            trial.faults.append(f"ended before anything was done: {fleet.ends}")
            return
        trial.after_s = time.monotonic() - began_s
        trial.step = self._step()
        match trial.what:
            case "kill":
                fleet.signal(signal.SIGKILL, trial.victim)
                self._see_all_end(fleet, trial)
            case "stop":
                fleet.signal(signal.SIGSTOP, trial.victim)
                self._see_all_end(fleet, trial)
            case _:
                self._slow(fleet, trial)
                self._continue(fleet, trial)

    def _see_all_end(self, fleet: Fleet, trial: Trial) -> None:
        done_s, limit_s = time.monotonic(), self._args.peer_timeout_s + _SLACK_S
        others = set(range(self._args.num_processes)) - {trial.victim}
        if not fleet.wait(2 * limit_s, but=[trial.victim]):
            trial.faults.append(f"{fleet.running()} are still there")
            return
        trial.exit_s = max(fleet.ends[i].time_s for i in others) - done_s
        if trial.exit_s > limit_s:
            trial.faults.append(f"took {trial.exit_s:.2f} s, not {limit_s:g}")
        for i in sorted(others):
            status, last = fleet.ends[i].status, fleet.last_line(i)
            if status == 0:
                trial.faults.append(f"process {i} ended with 0")
            if f"process {trial.victim} (" not in last:
                trial.faults.append(f"process {i} says last (status {status}) {last!r}")

    def _slow(self, fleet: Fleet, trial: Trial) -> None:
        until_s = time.monotonic() + _SLOW_S
        while time.monotonic() < until_s and not fleet.ends:
            for number, least_s, most_s in (
                (signal.SIGSTOP, 0.1, self._args.peer_timeout_s / 4),
                (signal.SIGCONT, 0.05, 0.5),
            ):
                fleet.signal(number, trial.victim)
                time.sleep(self._random.uniform(least_s, most_s))

    def _continue(self, fleet: Fleet, trial: Trial) -> None:
        """Sees the run make some steps, and end in order when it is told to."""
        before = self._step()
        goes_on = fleet.until(
            lambda: bool(fleet.ends) or self._step() > before + 2, _PATIENCE_S
        )
        if fleet.ends or not goes_on:
            said = {i: fleet.last_line(i) for i in fleet.ends}
            trial.faults.append(f"the run did not go on: {said}")
            return
        told_s = time.monotonic()
        fleet.signal(signal.SIGTERM, self._random.randrange(self._args.num_processes))
        if not fleet.wait(_PATIENCE_S):
            trial.faults.append(f"{fleet.running()} did not end when told")
            return
        trial.exit_s = max(end.time_s for end in fleet.ends.values()) - told_s
        bad = {i: end.status for i, end in fleet.ends.items() if end.status}
        if bad:
            trial.faults.append(f"ended with {bad}")

    def _step(self) -> int:
        return max(fleet_lib.steps(self._workdir), default=0)


def summary(trials: list[Trial], peer_timeout_s: float) -> dict[str, object]:
    """Returns what `--json` holds."""
    failures = [trial for trial in trials if trial.what in ("kill", "stop")]
    return {
        "trials": len(trials),
        "clean_exits": sum(not trial.faults for trial in trials),
        "slowest_exit_s": max((trial.exit_s for trial in failures), default=0.0),
        "leaked_processes": sum(trial.leaked for trial in trials),
        "peer_timeout_s": peer_timeout_s,
        "details": [dataclasses.asdict(trial) for trial in trials],
    }


def main() -> None:
    """Reads the command line and runs the trials; 1 if any was not clean."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=pathlib.Path, help="where the figures go")
    parser.add_argument("--num_processes", type=int, default=4)
    parser.add_argument("--peer_timeout_s", type=float, default=5.0)
    parser.add_argument("--window_s", type=float, default=12.0, help="from joining on")
    parser.add_argument(
        "--what", nargs="+", default=["kill"] * 3 + ["stop"] + ["slow"], help="draws"
    )
    parser.add_argument("--config", default="configs/lm.py:small")
    parser.add_argument(
        "arguments", nargs="*", help="of the training command, after --"
    )
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: tidies up
    trials = []
    with tempfile.TemporaryDirectory(prefix="chaos_") as folder:
        chaos = Chaos(args, pathlib.Path(folder) / "run")
        print(_HEADER, flush=True)
        for number in range(args.trials):
            trials.append(chaos.trial(number))
            print(trials[-1].row(), flush=True)
        last = chaos.undisturbed(args.trials)
        print(last.row(), flush=True)
    found = summary(trials, args.peer_timeout_s) | {"end": dataclasses.asdict(last)}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    kinds = collections.Counter(trial.what for trial in trials)
    print(
        f"{found['trials']} trials ({dict(kinds)}): {found['clean_exits']} clean, "
        f"slowest exit {found['slowest_exit_s']:.2f} s at --peer_timeout_s="
        f"{args.peer_timeout_s:g}, {found['leaked_processes']} processes left behind; "
        f"continued to the end: {'yes' if not last.faults else 'no'}"
    )
    sys.exit(found["clean_exits"] != len(trials) or bool(last.faults))


if __name__ == "__main__":
    main()
