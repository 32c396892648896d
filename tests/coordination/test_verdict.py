"""Who failed first: stories of beats, reports and silence, with an exact ending."""

import jax
import pytest

from rrfp_jax.coordination import verdict
from rrfp_jax.coordination.verdict import Beat, Failed, Judge, Left, Verdict
from rrfp_jax.errors import (
    ConfigError,
    PeerLost,
    ProtocolError,
    RemoteError,
    StallError,
)

PEER_S, STALL_S = 8.0, 20.0


class Court:
    """A judge of three processes, and a clock that is set by hand."""

    def __init__(self):
        self.judge = Judge(
            range(3), lambda process: f"process {process} (rank {process})", PEER_S, 20
        )
        self.now_s = 100.0
        assert self.judge.tick(self.now_s) is None

    def run(self, seconds, beating=(0, 1, 2), progress=0, idle=()):
        """Lets time pass; returns the verdict and when it came."""
        for _ in range(seconds):
            for process in beating:
                beat = Beat(process, progress, process in idle)
                assert self.judge.handle(beat) is None
            self.now_s += 1.0
            found = self.judge.tick(self.now_s)
            if found is not None:
                return found, self.now_s - 100.0
        return None


@pytest.fixture
def court():
    return Court()


def test_nothing_is_found_while_all_beat(court):
    assert court.run(100) is None


def test_a_silent_process_is_lost_and_named(court):
    assert court.run(5) is None
    found, now_s = court.run(100, beating=(0, 1))
    assert (found.process, found.kind, now_s) == (2, "lost", 12.0)
    assert found.text == (
        "process 2 (rank 2) was not heard of for 8 s.\n"
        "  It was killed (out of memory?), or is frozen or cut off: see the end of its "
        "own log, and its machine."
    )
    assert isinstance(found.error(), PeerLost)


def test_a_process_that_never_beats_is_lost(court):
    found, now_s = court.run(100, beating=(0, 2))
    assert (found.process, found.kind, now_s) == (1, "lost", 8.0)


def test_a_failure_of_its_own_is_the_cause_at_once(court):
    found = court.judge.handle(Failed(1, "ValueError: boom", False))
    assert found == Verdict(1, "failed", "process 1 (rank 1) failed: ValueError: boom")
    assert isinstance(found.error(), RemoteError)
    assert str(found.error()) == found.text


def test_there_is_one_verdict_and_the_earliest(court):
    assert court.judge.handle(Failed(1, "ValueError: boom", False)).process == 1
    assert court.judge.handle(Failed(2, "ValueError: bang", False)) is None
    assert court.run(100, beating=()) is None


def test_a_consequence_waits_for_a_failure(court):
    assert court.judge.handle(Failed(0, "connection reset", True)) is None
    assert court.run(3, beating=(1, 2)) is None
    assert court.judge.handle(Failed(2, "ValueError: boom", False)).process == 2


def test_a_consequence_waits_for_a_silence(court):
    """Process 2 was heard for the last time just before the others noticed."""
    assert court.run(4) is None
    assert court.judge.handle(Failed(0, "connection reset", True)) is None
    assert court.judge.handle(Failed(1, "connection reset", True)) is None
    found, now_s = court.run(100, beating=())
    assert (found.process, found.kind, now_s) == (2, "lost", 11.0)


def test_a_consequence_without_a_better_cause_is_the_verdict(court):
    """The first of them, after as long as a silence takes to be noticed."""
    assert court.run(2) is None
    assert court.judge.handle(Failed(1, "connection reset", True)) is None
    assert court.run(2, beating=(0, 2)) is None
    assert court.judge.handle(Failed(0, "connection closed", True)) is None
    found, now_s = court.run(100, beating=(2,))
    assert found == (1, "failed", "process 1 (rank 1) failed: connection reset")
    assert now_s == 10.0


def test_who_has_reported_is_not_lost(court):
    assert court.judge.handle(Failed(1, "connection reset", True)) is None
    assert court.run(5, beating=(0, 2)) is None
    found, _ = court.run(100, beating=(0, 2))
    assert found.kind == "failed"


def test_who_has_left_is_not_lost(court):
    for process in range(3):
        assert court.judge.handle(Left(process)) is None
        assert court.run(30, beating=range(process + 1, 3)) is None


def test_a_beat_that_was_overtaken_by_a_goodbye_changes_nothing(court):
    court.judge.handle(Left(2))
    court.judge.handle(Beat(2, 0, False))
    assert court.run(30, beating=(0, 1)) is None


def test_all_idle_without_progress_is_a_stall(court):
    court.run(3, idle=(0, 2))
    found, now_s = court.run(100, idle=(0, 1, 2))
    assert (found.process, found.kind, now_s) == (0, "stalled", 23.0)
    assert found.text.startswith(
        "process 0 (rank 0) waits, as do all 3 processes, and nothing has happened "
        "anywhere for 20 s. It was the first.\n"
    )
    assert isinstance(found.error(), StallError)


def test_progress_of_one_process_is_no_stall(court):
    """It was idle at each beat, but not in between."""
    for progress in range(5):
        assert court.run(15, idle=(0, 1, 2), progress=progress) is None


def test_a_process_that_is_busy_is_no_stall(court):
    """It computes something long, and the others wait for it."""
    assert court.run(100, idle=(0, 1)) is None


def test_a_stall_among_those_who_are_left(court):
    court.judge.handle(Left(1))
    found, _ = court.run(100, beating=(0, 2), idle=(0, 2))
    assert "as do all 2 processes" in found.text


def test_a_judge_that_was_frozen_blames_nobody(court):
    """The letters of that time may be read a moment later."""
    court.run(2)
    court.now_s += 1000.0
    assert court.judge.tick(court.now_s) is None
    assert court.run(100) is None


def caused_by(cause):
    try:
        raise ValueError("boom") from cause
    except ValueError as error:
        return error


RESET = jax.errors.JaxRuntimeError("INTERNAL: Connection reset by peer")


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RESET, True),
        (jax.errors.JaxRuntimeError("UNAVAILABLE: Task /job:0 died"), True),
        (jax.errors.JaxRuntimeError("FAILED: Gloo AllReduce failed: timeout"), True),
        (RuntimeError("UNAVAILABLE: JAX has ended this process"), True),
        (ConnectionResetError(), True),
        (BrokenPipeError(), True),
        (PeerLost("process 2"), True),
        (caused_by(RESET), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), False),
        (jax.errors.JaxRuntimeError("INVALID_ARGUMENT: shapes"), False),
        (ValueError("connection reset"), False),
        (ProtocolError("A peer sent ... unavailable"), False),
        (StallError("gloo"), False),
        (ConfigError("no connection"), False),
        (KeyboardInterrupt(), False),
        (caused_by(OSError("disk full")), False),
    ],
)
def test_what_looks_like_the_death_of_another(error, expected):
    assert verdict.is_consequence(error) == expected
