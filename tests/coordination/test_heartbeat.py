"""All processes learn one first cause; here they are threads, with real mail.

Times are short, but nothing is asserted about them: only who learns what, and, where
it is promised, before what.
"""

import json
import subprocess
import sys
import threading
import time

import jax
import pytest

from rrfp_jax.coordination import heartbeat
from rrfp_jax.coordination.heartbeat import Heartbeat
from rrfp_jax.errors import PeerLost, RemoteError, StallError
from rrfp_jax.transport import mail
from rrfp_jax.transport.mail import Mail

PATIENCE_S = 30.0  # how long a test waits in vain
BROKEN = jax.errors.JaxRuntimeError("INTERNAL: Connection reset by peer")


class Run:
    """A run of some processes; each starts when it is asked for."""

    def __init__(self, num_processes, peer_s=1.0, stall_s=60.0, grace_s=60.0):
        self.fatal = [[] for _ in range(num_processes)]
        self.mails = [Mail(process, "run") for process in range(num_processes)]
        for opened in self.mails:
            opened.introduce([each.address for each in self.mails])
        self.hearts = [
            Heartbeat(
                process,
                num_processes,
                opened,
                lambda number: f"process {number} (rank {number})",
                peer_s,
                stall_s,
                self.fatal[process].append,
                grace_s,
            )
            for process, opened in enumerate(self.mails)
        ]
        self.started = []

    def start(self, *processes):
        """Starts some; the rest stay silent."""
        for process in processes:
            self.hearts[process].start()
            self.started.append(process)
        return [self.hearts[process] for process in processes]

    def report_all(self, errors):
        """Lets processes die at once; returns what each of them says last."""
        said = {}

        def die(process, error):
            said[process] = self.hearts[process].report(error, "")

        threads = [threading.Thread(target=die, args=item) for item in errors.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
        return said

    def close(self):
        """Ends all; process 0 last, as others have things to say to it."""
        for process, heart in reversed(list(enumerate(self.hearts))):
            if process in self.started:
                heart.stop()
        for process, opened in enumerate(self.mails):
            if process not in self.started:
                opened.close()


@pytest.fixture
def make_run():
    runs = []

    def make(*args, **kwargs):
        runs.append(Run(*args, **kwargs))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


def until(condition):
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def verdict_of(heart):
    """Waits for the verdict, as a main thread that comes by often."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        try:
            heart.check()
        except (PeerLost, RemoteError, StallError) as error:
            return type(error), str(error).partition("\n")[0]
        time.sleep(0.005)
    raise AssertionError("no verdict came")


def test_all_is_well_while_all_beat_and_when_they_leave(make_run):
    """One leaves early, and is not missed."""
    run = make_run(3)
    zero, one, two = run.start(0, 1, 2)
    two.stop()
    ended = threading.Event()
    for _ in range(15):
        ended.wait(0.1)
        zero.check()
        one.check()


def test_a_silent_process_is_named_to_all(make_run):
    zero, one = make_run(3, peer_s=0.5).start(0, 1)
    expected = (PeerLost, "process 2 (rank 2) was not heard of for 0.5 s.")
    assert [verdict_of(zero), verdict_of(one)] == [expected] * 2


def test_a_silent_process_0_is_noticed_by_each(make_run):
    one, two = make_run(3, peer_s=0.5).start(1, 2)
    expected = (PeerLost, "process 0 (rank 0) was not heard of for 0.5 s.")
    assert [verdict_of(one), verdict_of(two)] == [expected] * 2


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_told_to_all_before_who_failed_is_gone(
    make_run, failing, monkeypatch
):
    """By the time that process 0 may exit, nobody needs it any more.

    It is not time that ends the wait for them, but that they have confirmed it.
    """
    monkeypatch.setattr(heartbeat, "_FLUSH_S", 1e6)
    run = make_run(3, peer_s=1e6)
    hearts = run.start(0, 1, 2)
    text = hearts[failing].report(ValueError("boom"), "in step 7")
    assert text == (
        f"process {failing} (rank {failing}) failed: in step 7: ValueError: boom"
    )
    for process in {0, 1, 2} - {failing} if failing == 0 else {0}:
        with pytest.raises(RemoteError) as caught:
            hearts[process].check()
        assert str(caught.value) == text
    assert verdict_of(hearts[2])[0] is RemoteError


def test_those_who_die_of_another_name_that_one(make_run):
    """Whoever is first to speak."""
    run = make_run(3, peer_s=30.0)
    run.start(0, 1, 2)
    said = run.report_all({0: BROKEN, 1: BROKEN, 2: ValueError("boom")})
    assert set(said.values()) == {"process 2 (rank 2) failed: ValueError: boom"}
    assert set(said) == {0, 1, 2}


def test_those_who_die_of_a_silent_one_name_that_one(make_run):
    run = make_run(3, peer_s=0.5)
    run.start(0, 1)
    said = run.report_all({0: BROKEN, 1: BROKEN})
    assert {text.partition("\n")[0] for text in said.values()} == {
        "process 2 (rank 2) was not heard of for 0.5 s."
    }
    assert set(said) == {0, 1}


def test_those_who_die_of_process_0_name_it(make_run):
    run = make_run(3, peer_s=0.5)
    run.start(1, 2)
    said = run.report_all({1: BROKEN, 2: BROKEN})
    assert {text.partition("\n")[0] for text in said.values()} == {
        "process 0 (rank 0) was not heard of for 0.5 s."
    }
    assert set(said) == {1, 2}


def test_a_broken_connection_with_all_alive_is_a_cause_too(make_run):
    run = make_run(2, peer_s=0.5)
    zero, one = run.start(0, 1)
    text = one.report(BROKEN, "")
    assert text.startswith("process 1 (rank 1) failed: JaxRuntimeError: INTERNAL: Conn")
    assert verdict_of(zero)[0] is RemoteError


def test_all_waiting_for_each_other_is_a_stall(make_run):
    hearts = make_run(3, peer_s=1.0, stall_s=0.3).start(0, 1, 2)
    for heart in hearts:
        heart.progress(is_idle=True)
    found = {verdict_of(heart) for heart in hearts}
    ((error, text),) = found
    assert error is StallError
    assert "as do all 3 processes, and nothing has happened anywhere for 0.3 s" in text


def test_a_main_thread_that_does_not_come_is_ended(make_run):
    """It hangs in a collective, perhaps. Who did come ends on its own."""
    run = make_run(3, peer_s=0.5, grace_s=0.2)
    zero, one = run.start(0, 1)
    one.report(BROKEN, "")
    until(lambda: run.fatal[0])
    zero.stop()
    one.stop()
    (text,) = run.fatal[0]
    assert text.startswith("process 2 (rank 2) was not heard of")
    assert run.fatal[1] == []


def test_after_process_0_has_left_each_speaks_for_itself(make_run):
    run = make_run(2, peer_s=30.0)
    zero, one = run.start(0, 1)
    zero.stop()
    until(lambda: not one._others)
    assert one.report(BROKEN, "").startswith("process 1 (rank 1) failed: JaxRuntime")


def test_a_report_after_the_end_returns_at_once(make_run):
    (zero,) = make_run(1, peer_s=30.0).start(0)
    zero.stop()
    assert zero.report(ValueError("boom"), "") == (
        "process 0 (rank 0) failed: ValueError: boom"
    )


def test_a_huge_message_is_cut(make_run):
    (zero, _) = make_run(2, peer_s=30.0).start(0, 1)
    assert len(zero.report(ValueError("x" * 1_000_000), "")) < 11_000


def test_no_thread_is_left_behind(make_run, monkeypatch):
    """Nor does anybody wait to say more to those who have left."""
    monkeypatch.setattr(mail, "_LINGER_MS", 1_000_000)
    before = set(threading.enumerate())
    run = make_run(2)
    hearts = run.start(0, 1)
    assert len(set(threading.enumerate()) - before) == 4
    for heart in reversed(hearts):
        heart.stop()
    assert set(threading.enumerate()) == before


PROCESS = """
import json, os, sys, time
from rrfp_jax.coordination.heartbeat import Heartbeat
from rrfp_jax.transport.mail import Address, Mail

def die(text):
    print(text, file=sys.stderr, flush=True)
    os._exit(1)

process = int(sys.argv[1])
mail = Mail(process, "run")
print(json.dumps(mail.address), flush=True)
mail.introduce([Address(*address) for address in json.loads(sys.stdin.readline())])
heart = Heartbeat(process, 3, mail, "process {}".format, 2.0, 60.0, die, 0.5)
heart.start()
print("started", flush=True)
time.sleep(60)  # hangs
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("victim", [0, 2])
def test_when_a_real_process_is_killed_the_others_end_and_name_it(victim):
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(process)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(3)
    ]
    addresses = [json.loads(process.stdout.readline()) for process in processes]
    for process in processes:
        print(json.dumps(addresses), file=process.stdin, flush=True)
    for process in processes:
        assert process.stdout.readline() == "started\n"
    processes[victim].kill()
    for number, process in enumerate(processes):
        _, stderr = process.communicate(timeout=PATIENCE_S)
        if number != victim:
            assert process.returncode == 1
            assert f"process {victim} was not heard of for 2 s." in stderr
