"""Who failed first: from beats, reports and silence to one verdict. Pure.

When a process dies, the others die of it: their collectives break, their transfers are
reset. They report within milliseconds, long before the silence of the dead one is
noticed. So a report is taken for the cause at once only if its error is no consequence
(`is_consequence`). Any other waits, at most as long as a silence takes to be noticed,
for a better cause: a process that fails on its own account, or one that is silent.

The judge has no clock and no socket: `tick` tells the time, in seconds of any monotonic
clock, and what it was told since the tick before counts as told then. Time during which
nobody ticked is hardly counted: if the judge was frozen itself, nobody was silent.
"""

import enum
import math
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax

from rrfp_jax.errors import PeerLost, RemoteError, StallError


class Beat(NamedTuple):
    """A process is alive."""

    process: int
    progress: int  # grows with all that happens there
    is_idle: bool  # waits for others: nothing is running there


class Failed(NamedTuple):
    """A process ends with an error, and says so."""

    process: int
    cause: str
    is_consequence: bool


class Left(NamedTuple):
    """A process has ended well, or was told of the verdict; watched no longer."""

    process: int


Report = Beat | Failed | Left


class VerdictKind(enum.StrEnum):
    """What happened to the process."""

    LOST = "lost"
    FAILED = "failed"
    STALLED = "stalled"


class Verdict(NamedTuple):
    """The first cause, for all processes the same."""

    process: int
    kind: VerdictKind
    text: str

    def error(self) -> PeerLost | RemoteError | StallError:
        """Returns the verdict as what is to be raised."""
        match self.kind:
            case VerdictKind.LOST:
                return PeerLost(self.text)
            case VerdictKind.FAILED:
                return RemoteError(self.text)
            case VerdictKind.STALLED:
                return StallError(self.text)


class Judge:
    """Watches processes, until there is a verdict."""

    def __init__(
        self,
        watched: Collection[int],
        describe: Callable[[int], str],
        peer_timeout_s: float,
        stall_timeout_s: float = math.inf,
    ) -> None:
        """Begins to watch, at the first tick.

        Args:
          watched: the processes.
          describe: names one and what it holds: "process 3 (rank 1, replica 0)".
          peer_timeout_s: how long one may be silent. Tick several times as often.
          stall_timeout_s: how long all may be idle together.
        """
        self._describe = describe
        self._peer_timeout_s, self._stall_timeout_s = peer_timeout_s, stall_timeout_s
        self._tick_s: float | None = None  # the last one, by the caller's clock
        self._now_s = 0.0  # what of the time since the first tick is counted
        self._beats: dict[int, Beat | None] = dict.fromkeys(watched)  # the last one
        self._heard_s = dict.fromkeys(watched, 0.0)  # all and only those watched
        self._idle_since_s = dict.fromkeys(watched, math.inf)  # inf: not idle
        self._consequence: tuple[Failed, float] | None = None  # the first; when told
        self._verdict: Verdict | None = None

    def handle(self, report: Report) -> Verdict | None:
        """Takes a report; returns the verdict if this is what brings it about."""
        match report:
            case Beat(process) if process in self._heard_s:
                self._heard_s[process] = self._now_s
                if not report.is_idle:
                    self._idle_since_s[process] = math.inf
                elif report != self._beats[process]:
                    self._idle_since_s[process] = self._now_s
                self._beats[process] = report
            case Failed(process, _, True):
                self._forget(process)
                if self._consequence is None:
                    self._consequence = report, self._now_s
            case Failed(process, cause, False):
                return self._conclude(process, VerdictKind.FAILED, f"failed: {cause}")
            case Left(process):
                self._forget(process)
        return None

    def tick(self, now_s: float) -> Verdict | None:
        """Tells the time; returns the verdict if it was time for it."""
        if self._tick_s is not None:
            passed_s = now_s - self._tick_s
            self._now_s += min(passed_s, self._peer_timeout_s / 4)
        self._tick_s = now_s
        return self._silence() or self._late_consequence() or self._stall()

    def _silence(self) -> Verdict | None:
        for process, heard_s in self._heard_s.items():
            if self._now_s - heard_s >= self._peer_timeout_s:
                return self._conclude(
                    process,
                    VerdictKind.LOST,
                    f"was not heard of for {self._peer_timeout_s:g} s.\n"
                    "  It was killed (out of memory?), or is frozen or cut off: see "
                    "the end of its own log, and its machine.",
                )
        return None

    def _late_consequence(self) -> Verdict | None:
        if self._consequence is None:
            return None
        failed, told_s = self._consequence
        if self._now_s - told_s < self._peer_timeout_s:
            return None
        return self._conclude(
            failed.process, VerdictKind.FAILED, f"failed: {failed.cause}"
        )

    def _stall(self) -> Verdict | None:
        since_s = max(self._idle_since_s.values(), default=math.inf)
        if self._now_s - since_s < self._stall_timeout_s:
            return None
        first = min(self._idle_since_s, key=lambda p: (self._idle_since_s[p], p))
        return self._conclude(
            first,
            VerdictKind.STALLED,
            f"waits, as do all {len(self._idle_since_s)} processes, and nothing has "
            f"happened anywhere for {self._stall_timeout_s:g} s. It was the first.\n"
            "  See what each waits for in its log. This is a bug in rrfp_jax, or a "
            "letter was lost as a connection broke; please report it.",
        )

    def _forget(self, process: int) -> None:
        for facts in (self._beats, self._heard_s, self._idle_since_s):
            facts.pop(process, None)

    def _conclude(self, process: int, kind: VerdictKind, text: str) -> Verdict | None:
        """Returns the verdict, the first time."""
        if self._verdict is not None:
            return None
        self._verdict = Verdict(process, kind, f"{self._describe(process)} {text}")
        return self._verdict


_MARKS_OF_A_BROKEN_PEER = (
    "unavailable",
    "deadline_exceeded",
    "connection closed",
    "connection reset",
    "connection refused",
    "connection aborted",
    "broken pipe",
    "socket closed",
    "gloo",
    "nccl",
    "coordination service",
)


def is_consequence(error: BaseException) -> bool:
    """Returns whether an error looks like the death of another process.

    So do broken connections, and what JAX says, in JaxRuntimeErrors and RuntimeErrors,
    when a collective or a transfer breaks; and whatever was raised from such an error.
    """
    if isinstance(error, ConnectionError | PeerLost | RemoteError):
        return True
    # None of our own errors, which are RuntimeErrors as well.
    if type(error) is RuntimeError or isinstance(error, jax.errors.JaxRuntimeError):
        text = str(error).lower()
        if any(mark in text for mark in _MARKS_OF_A_BROKEN_PEER):
            return True
    return error.__cause__ is not None and is_consequence(error.__cause__)
