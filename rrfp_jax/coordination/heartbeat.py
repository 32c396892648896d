"""A thread a process that hears whether the others live, and learns who failed first.

A star: everybody beats to process 0, which answers each beat with its own; the more
there are, the less often (`beat_interval_s`). Process 0 asks its `Judge` about all, and
tells all of the verdict; every other process has a judge too, of process 0 only, for
then nobody else could tell. So all hear the same first cause, but when the network
falls into parts.

A process that dies with an error reports it, and stays until it knows the verdict; so
does process 0 until all others have confirmed that they know it (or are lost, or time
is up): they would have nobody to hear it from. A process whose main thread does not
report soon after a verdict, since it hangs in a collective with the dead or in what it
cleans up, is ended by the thread. When process 0 has said goodbye, nobody watches any
more.

The mail is not the one of the payloads: this thread owns it, and answers while the main
thread compiles.
"""

import contextlib
import math
import threading
import time
from collections.abc import Callable

from absl import logging

from rrfp_jax.coordination.verdict import (
    Beat,
    Failed,
    Judge,
    Left,
    Verdict,
    VerdictKind,
    is_consequence,
)
from rrfp_jax.transport.mail import Letter, Mail

_FLUSH_S = 1.0  # in which the others should confirm a verdict
_PAUSE_S = 0.05  # between looks, near the end
_BATCH_S = 0.01  # at least, between looks: to wake costs more than to read a letter
_PATIENCE_S = 2.0  # of `report`, beyond what a silence takes to be noticed
_LONGEST_CAUSE = 10_000  # characters; JAX's can be megabytes
_LONGEST_TICK_S = 1.0  # between two looks of the judge
# Of the beat interval, a process: a beat and its answer take process 0 80 us of CPU
# (scripts/bench/heartbeats.py), so all of them 4 % of a core.
_SPREAD_S = 80e-6 / 0.04


def beat_interval_s(
    num_processes: int, peer_timeout_s: float, stall_timeout_s: float
) -> float:
    """Returns how often a process beats: each second, in a large run less often.

    It grows with the processes, so that what process 0 spends does not; but there are 8
    beats or more in either timeout. So with the defaults it grows up to 3,750
    processes, to 7.5 s.

    A silence is noticed as soon as with a beat each second: it counts from the last
    beat, which was before it, and the judge looks each second whatever the interval is.
    Process 0 tells of a verdict at once, and no beat is waited for. What longer
    intervals take away is margin: of a process that is alive, 8 beats in a row have to
    be late before it counts as silent. And whether a process is idle is known from its
    last beat, so without several of them in `stall_timeout_s` a run that goes on could
    be taken for one that waits for itself.
    """
    longest_s = min(peer_timeout_s, stall_timeout_s) / 8
    spread_s = min(_SPREAD_S * num_processes, longest_s)
    return min(max(_LONGEST_TICK_S, spread_s), peer_timeout_s / 8)


class Heartbeat:
    """Watches the run for one process. For its main thread, but for `report`."""

    def __init__(
        self,
        process: int,
        num_processes: int,
        mail: Mail,
        describe: Callable[[int], str],
        peer_timeout_s: float,
        stall_timeout_s: float,
        on_fatal: Callable[[str], None],
        grace_s: float = 3.0,
    ) -> None:
        """Sends nothing before `start`.

        Args:
          process: this one.
          num_processes: of the run.
          mail: introduced; the thread's from `start` on, which closes it in the end.
          describe: names a process and what it holds, from any thread.
          peer_timeout_s: how long a process may be silent.
          stall_timeout_s: how long all of them may be idle together.
          on_fatal: called by the thread with the first cause, if the main thread does
            not report once there is one; is to end the process.
          grace_s: how long the thread waits for the main thread.
        """
        self._process, self._mail, self._describe = process, mail, describe
        self._peer_timeout_s = peer_timeout_s
        self._on_fatal, self._grace_s = on_fatal, grace_s
        self._interval_s = beat_interval_s(
            num_processes, peer_timeout_s, stall_timeout_s
        )
        self._tick_s = min(_LONGEST_TICK_S, peer_timeout_s / 8)
        is_first = process == 0
        # Whom this process writes to, and has not heard goodbye from.
        self._others = set(range(1, num_processes)) if is_first else {0}
        self._judge = Judge(
            range(num_processes) if is_first else [0],
            describe,
            peer_timeout_s,
            stall_timeout_s if is_first else math.inf,
        )
        # Written by the main thread, each as a whole:
        self._state = (0, False)  # progress, is_idle
        self._failure: Failed | None = None
        self._is_ending = False  # by itself, or by `on_fatal`
        self._stopped_s = math.inf  # when it was told to stop
        # Written by the thread:
        self._verdict: Verdict | None = None
        self._verdict_s = math.inf  # when it was learned
        self._untold: set[int] = set()  # who has not confirmed it
        self._is_settled = threading.Event()  # nobody waits for this process any more
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begins to watch, and to be watched."""
        self._thread.start()

    def stop(self) -> None:
        """Says goodbye, since all is done, and closes the mail.

        This process is watched no longer. Process 0 waits a second at most for the
        others' goodbyes, which they could else not deliver.
        """
        self._stopped_s = time.monotonic()
        self._mail.wake()
        self._thread.join()

    def progress(self, is_idle: bool) -> None:
        """Notes that something happened here. Cheap; not to be called when nothing did.

        Args:
          is_idle: whether nothing is running here now, so that only others can make
            something happen.
        """
        self._state = (self._state[0] + 1, is_idle)

    def check(self) -> None:
        """Returns if all is well.

        Raises:
          PeerLost: a process is silent.
          RemoteError: a process has failed.
          StallError: all of them wait for each other.
        """
        if self._verdict is not None:
            raise self._verdict.error()

    def report(self, error: BaseException, where: str) -> str:
        """Tells the others that this process ends with an error. From any thread.

        Waits, at most `peer_timeout_s` and two seconds, until the first cause is known
        here and wherever it is to be heard from here. Ctrl-C ends the wait.

        Args:
          error: what ends this process.
          where: what it was doing, to stand before the error; may be empty.

        Returns:
          The first cause of all, to be printed last.
        """
        self._is_ending = True
        cause = f"{where}: " if where else ""
        cause += f"{type(error).__name__}: {error}"[:_LONGEST_CAUSE]
        self._failure = Failed(self._process, cause, is_consequence(error))
        self._mail.wake()
        with contextlib.suppress(KeyboardInterrupt):
            self._is_settled.wait(self._peer_timeout_s + _PATIENCE_S)
        if self._verdict is not None:
            return self._verdict.text
        return f"{self._describe(self._process)} failed: {cause}"

    def _run(self) -> None:
        try:
            due_s = tick_due_s = time.monotonic()
            while not self._may_end():
                for letter in self._mail.receive():
                    self._read(letter)
                now_s = time.monotonic()
                if now_s >= due_s:
                    due_s = now_s + self._interval_s
                    self._beat()
                self._speak()
                if now_s >= tick_due_s:  # not at each letter: it looks at all
                    tick_due_s = now_s + self._tick_s
                    self._learn(self._judge.tick(now_s))
                self._follow_up(now_s)
                is_ending = self._verdict is not None or self._stopped_s < math.inf
                time.sleep(_BATCH_S)
                rest_s = min(due_s, tick_due_s) - time.monotonic()
                self._mail.wait(_PAUSE_S if is_ending else rest_s)
            for other in self._others if self._verdict is None else ():
                self._mail.send(other, "left", ())
            self._mail.close()
        finally:  # also of an error of ours: nobody is to wait for a dead thread
            self._is_settled.set()

    def _may_end(self) -> bool:
        if time.monotonic() < self._stopped_s:
            return False
        if self._verdict is not None:
            return not self._untold
        is_late = time.monotonic() >= self._stopped_s + _FLUSH_S
        return self._process != 0 or not self._others or is_late

    def _read(self, letter: Letter) -> None:
        sender = letter.sender
        match letter.kind, letter.body:
            case "beat", (int(progress), bool(is_idle)):
                self._learn(self._judge.handle(Beat(sender, progress, is_idle)))
                if self._process == 0:
                    self._answer(sender)
            case "failed", (str(cause), bool(is_late)):
                self._learn(self._judge.handle(Failed(sender, cause, is_late)))
            case "left", ():
                self._learn(self._judge.handle(Left(sender)))
                self._others.discard(sender)
                self._untold.discard(sender)
                self._mail.dismiss(sender)
            case "verdict", (int(process), "lost" | "failed" | "stalled" as kind, text):
                self._learn(Verdict(process, VerdictKind(kind), str(text)))
                self._mail.send(sender, "heard", ())
            case "heard", ():
                self._untold.discard(sender)
            case kind, body:
                logging.warning(
                    "process %d does not know what process %d means by %r %r",
                    self._process,
                    sender,
                    kind,
                    body,
                )

    def _beat(self) -> None:
        if self._process == 0:
            self._learn(self._judge.handle(Beat(0, *self._state)))
        elif self._verdict is None and 0 in self._others:
            self._mail.send(0, "beat", self._state)

    def _answer(self, sender: int) -> None:
        """Answers a beat; who beats although there is a verdict has not heard it."""
        if self._verdict is None:
            self._mail.send(sender, "beat", self._state)
        else:
            self._mail.send(sender, "verdict", self._verdict)

    def _speak(self) -> None:
        """Passes on what the main thread has reported."""
        failure, self._failure = self._failure, None
        if failure is None:
            return
        if self._process == 0:
            self._learn(self._judge.handle(failure))
        elif 0 in self._others:
            self._mail.send(0, "failed", failure[1:])
        else:  # nobody is left who would know better
            alone = failure._replace(is_consequence=False)
            self._learn(self._judge.handle(alone))

    def _learn(self, verdict: Verdict | None) -> None:
        """Takes the first verdict; process 0 tells it to all."""
        if verdict is None or self._verdict is not None:
            return
        self._verdict_s = time.monotonic()
        if self._process == 0:
            for other in self._others:
                self._mail.send(other, "verdict", verdict)
            is_lost = verdict.kind is VerdictKind.LOST
            self._untold = self._others - ({verdict.process} if is_lost else set())
        self._verdict = verdict

    def _follow_up(self, now_s: float) -> None:
        """Sees to it that a verdict has its effect."""
        if self._verdict is None:
            return
        if now_s >= self._verdict_s + _FLUSH_S:
            self._untold = set()
        if not self._untold:
            self._is_settled.set()
        if not self._is_ending and now_s >= self._verdict_s + self._grace_s:
            self._is_ending = True
            self._on_fatal(self._verdict.text)
