"""Letters between processes: whole, in order, and small ones before large ones."""

import subprocess
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest

from rrfp_jax.core.task import parse
from rrfp_jax.errors import ConfigError, ProtocolError
from rrfp_jax.transport import codec, mail
from tests.transport.conftest import collect


def test_a_letter_arrives_with_its_sender_its_body_and_its_frames(mails):
    body = ("é", 1 << 62, [parse("2F0"), None], {"loss": 0.5}, b"\x00")
    mails[1].send(0, "news", body, [b"abc", bytearray(b""), memoryview(b"de")])
    (letter,) = collect(mails[0], 1)
    assert letter == (
        1,
        "news",
        ("é", 1 << 62, (("F", 2, 0), None), {"loss": 0.5}, b"\x00"),
        [b"abc", b"", b"de"],
    )
    assert codec.read_task(letter.body[2][0]) == parse("2F0")


@pytest.mark.parametrize("bulk", [False, True])
def test_a_channel_keeps_the_order_of_a_pair(mails, bulk):
    for i in range(500):
        mails[i % 3].send(0, "count", i, [bytes(i)], bulk=bulk)
    letters = collect(mails[0], 500)
    for sender in range(3):
        bodies = [letter.body for letter in letters if letter.sender == sender]
        assert bodies == list(range(sender, 500, 3))
    assert all(letter.frames[0].nbytes == letter.body for letter in letters)


def test_a_letter_to_oneself_is_like_any_other_but_copies_no_frame(mails):
    array = np.arange(4.0)
    mails[0].send(0, "note", [1, [2]], [array])
    mails[0].wait(1e6)  # returns at once
    ((sender, kind, body, frames),) = mails[0].receive()
    assert (sender, kind, body) == (0, "note", (1, (2,)))
    assert np.shares_memory(np.frombuffer(frames[0]), array)


SIZES = [0, 1, mail.CHUNK_BYTES - 1, mail.CHUNK_BYTES, mail.CHUNK_BYTES + 1, 16 << 20]


def test_frames_of_any_size_arrive_intact(mails):
    """In chunks or not, and several of them in one letter."""
    random = np.random.default_rng(0)
    sent = [random.integers(0, 256, size, np.uint8) for size in SIZES]
    mails[1].send(0, "payload", (), sent, bulk=True)
    (letter,) = collect(mails[0], 1)
    assert [frame.nbytes for frame in letter.frames] == SIZES
    for frame, array in zip(letter.frames, sent, strict=True):
        np.testing.assert_array_equal(np.frombuffer(frame, np.uint8), array)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        np.float32(7.0),
        np.zeros((0, 3), np.int8),
        np.arange(6).reshape(2, 3).T,
    ],
    ids=["bfloat16", "scalar", "empty", "transposed"],
)
def test_an_array_arrives_with_its_header(mails, array):
    mails[1].send(0, "array", codec.pack_header(array.dtype, array.shape), [array])
    (letter,) = collect(mails[0], 1)
    found = codec.read_array(codec.read_header(letter.body), letter.frames[0])
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_a_small_letter_overtakes_payloads(mails):
    """Of 256 MiB, which take 0.2 s at least, most are not yet there."""
    payload = np.zeros(16 << 20, np.uint8)
    for mail_ in mails:
        mail_.send(0, "hello", ())
        mail_.send(0, "hello", (), bulk=True)
    collect(mails[0], 6)
    for _ in range(16):
        mails[1].send(0, "payload", (), [payload], bulk=True)
    mails[1].send(0, "urgent", ())
    kinds = [letter.kind for letter in collect(mails[0], 17)]
    assert kinds.index("urgent") < 8


def test_letters_wait_for_a_receiver_that_is_introduced_later(open_mail):
    """It refuses nobody before it knows whom to admit."""
    early, late = open_mail(0), open_mail(1)
    addresses = [early.address, late.address]
    early.introduce(addresses)
    early.send(1, "hello", ())
    late.wait(0.2)
    assert late.receive() == []
    late.introduce(addresses)
    assert collect(late, 1)[0].kind == "hello"


def test_the_last_letters_go_out_when_the_mail_is_closed(open_mail):
    one, two = open_mail(0), mail.Mail(1, "run")
    addresses = [one.address, two.address]
    one.introduce(addresses)
    two.introduce(addresses)
    two.send(0, "payload", (), [bytes(4 << 20)], bulk=True)
    two.send(0, "goodbye", ())
    two.close()
    two.wake()  # harmless, as another thread may not know yet
    assert {letter.kind for letter in collect(one, 2)} == {"payload", "goodbye"}


def test_letters_to_one_who_has_left_are_not_waited_for(monkeypatch):
    """With a linger that no test outlives."""
    monkeypatch.setattr(mail, "_LINGER_MS", 1_000_000)
    one, gone = mail.Mail(0, "run"), mail.Mail(1, "run")
    one.introduce([one.address, gone.address])
    gone.close()
    one.send(1, "hello", ())
    one.send(1, "payload", (), [bytes(1 << 20)], bulk=True)
    one.dismiss(1)
    one.close()


def test_wake_ends_the_present_wait_and_else_the_next(mails):
    """And no wait after that."""
    mails[0].wake()
    mails[0].wake()
    mails[0].wait(1e6)
    began_s = time.monotonic()
    mails[0].wait(0.05)
    assert time.monotonic() - began_s >= 0.05
    alarm = threading.Timer(0.1, mails[0].wake)
    alarm.start()
    mails[0].wait(1e6)
    alarm.join()
    assert mails[0].receive() == []


def test_a_wait_without_mail_sleeps_and_ends(mails):
    for mail_ in mails:  # connections, so that there is something to be woken by
        mail_.send(0, "hello", ())
    collect(mails[0], 3)
    busy_s, began_s = time.thread_time(), time.monotonic()
    mails[0].wait(0.5)
    assert time.monotonic() - began_s >= 0.5
    assert time.thread_time() - busy_s < 0.25
    for timeout_s in (0.0, 1e-6, 1e-5):
        mails[0].wait(timeout_s)


def test_a_body_that_is_too_large_is_refused_by_the_sender(mails):
    with pytest.raises(ProtocolError, match=r"'news' to process 0 has 262\d+ bytes"):
        mails[1].send(0, "news", bytes(mail.CHUNK_BYTES))
    mails[1].send(0, "news", 1)
    assert collect(mails[0], 1)[0].body == 1


def test_a_body_that_does_not_travel_is_refused_by_the_sender(mails):
    with pytest.raises(TypeError):
        mails[1].send(0, "news", object())
    mails[1].send(0, "news", 1)
    assert collect(mails[0], 1)[0].body == 1


def test_a_host_that_is_not_here_is_the_users_fault(open_mail):
    with pytest.raises(ConfigError, match=r"host '192\.0\.2\.1'"):
        open_mail(0, host="192.0.2.1")


def test_no_thread_is_left_behind():
    before = set(threading.enumerate())
    one = mail.Mail(0, "run")
    one.introduce([one.address])
    assert {t.name for t in set(threading.enumerate()) - before} == {"mail-guard"}
    one.close()
    assert set(threading.enumerate()) == before


ECHO = """
import sys
from rrfp_jax.transport.mail import Address, Mail
mail = Mail(1, "run")
print(*mail.address, flush=True)
mail.introduce([Address(*sys.stdin.readline().split()), mail.address])
while True:
    mail.wait(10.0)
    for letter in mail.receive():
        if letter.kind == "stop":
            mail.close()
            sys.exit()
        mail.send(0, "echo", letter.body, letter.frames, bulk=True)
"""


@pytest.mark.multiprocess
def test_two_real_processes_write_to_each_other(open_mail):
    one = open_mail(0)
    with subprocess.Popen(
        [sys.executable, "-c", ECHO],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        address = mail.Address(*other.stdout.readline().split())
        print(*one.address, file=other.stdin, flush=True)
        one.introduce([one.address, address])
        array = np.arange(1 << 20)
        for i in range(10):
            one.send(1, "payload", i, [array], bulk=True)
        for i, letter in enumerate(collect(one, 10)):
            assert letter.body == i
            np.testing.assert_array_equal(np.frombuffer(letter.frames[0], int), array)
        one.send(1, "stop", ())
        assert other.wait(30) == 0
