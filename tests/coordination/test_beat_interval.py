"""In a large run beats are rarer, and a silence is noticed as soon."""

import math
import threading

import pytest

from rrfp_jax.coordination import heartbeat
from rrfp_jax.coordination.heartbeat import Heartbeat, beat_interval_s
from rrfp_jax.coordination.verdict import Beat, Judge
from rrfp_jax.transport.mail import Mail

PEER_S, STALL_S = 60.0, 600.0  # the defaults
SIZES = (1, 2, 500, 1000, 3000, 4096, 16384)


def test_a_small_run_beats_each_second_a_large_one_less_often():
    found = [beat_interval_s(size, PEER_S, STALL_S) for size in SIZES]
    assert found == pytest.approx([1.0, 1.0, 1.0, 2.0, 6.0, 7.5, 7.5])


@pytest.mark.parametrize("size", SIZES)
def test_there_are_eight_beats_in_a_short_timeout_however_many_beat(size):
    assert beat_interval_s(size, 4.0, STALL_S) == 0.5
    assert beat_interval_s(size, PEER_S, 16.0) <= 2.0


def test_a_short_stall_timeout_makes_no_run_beat_more_often_than_each_second():
    assert beat_interval_s(16384, PEER_S, 1.0) == 1.0


@pytest.mark.parametrize("peer_s", [0.5, 8.0, PEER_S])
@pytest.mark.parametrize("size", [2, 4096, 16384])
def test_a_silence_is_noticed_in_time_and_none_before(size, peer_s):
    """Whenever the process dies after a beat; the judge looks as often as it does."""
    every_s, tick_s = beat_interval_s(size, peer_s, STALL_S), min(1.0, peer_s / 8)
    last_beat_s = 20 * every_s
    judge = Judge([1], "process {}".format, peer_s, math.inf)
    beats_s, now_s = [i * every_s for i in range(21)], 0.0
    while judge.tick(now_s) is None:
        now_s += tick_s
        while beats_s and beats_s[0] <= now_s:  # the letters are read before the tick
            beats_s.pop(0)
            assert judge.handle(Beat(1, 0, False)) is None
    assert last_beat_s < now_s <= last_beat_s + peer_s + tick_s


def test_process_0_looks_for_silence_more_often_than_it_beats(monkeypatch):
    """It ticks three times before its second beat would be due, after 8 s."""
    monkeypatch.setattr(heartbeat, "_LONGEST_TICK_S", 0.01)
    mail = Mail(0, "run")
    mail.introduce([mail.address])
    heart = Heartbeat(0, 4096, mail, str, 1e6, 1e6, lambda text: None)
    heart._others.clear()  # who are not there
    story, has_ticked = [], threading.Event()

    class Watched(Judge):
        def handle(self, report):
            story.append("beat")

        def tick(self, now_s):
            story.append("tick")
            if story.count("tick") == 3:
                has_ticked.set()

    heart._judge = Watched([], str, 1e6)
    heart.start()
    has_come = has_ticked.wait(30)
    heart.stop()
    assert has_come
    assert story[:4] == ["beat", "tick", "tick", "tick"]
