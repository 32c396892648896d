"""Who is not of this run delivers nothing, stops nothing, and is logged once."""

import contextlib
import itertools
import random
import socket
import struct
import time

import msgpack
import pytest
import zmq

from rrfp_jax.transport import codec, mail
from tests.transport.conftest import PATIENCE_S, collect

# ZMTP 3.1 (RFC 37), up to where the handshake begins.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
OVERSIZED_FRAME = b"\x02" + struct.pack(">Q", 1 << 40) + b"x" * 1000


@pytest.fixture
def warnings(caplog):
    """Returns what was logged, when there are `count` lines of it."""

    def lines(count):
        deadline_s = time.monotonic() + PATIENCE_S
        while len(caplog.records) < count:
            assert time.monotonic() < deadline_s, caplog.text
            time.sleep(0.01)
        return [record.getMessage() for record in caplog.records]

    return lines


def throw(address, data):
    """Sends bytes over a TCP connection of their own, and waits for its end.

    The other side may end it at any byte.
    """
    host, port = address.endpoint.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as client:
        with contextlib.suppress(OSError):
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while client.recv(1 << 16):
                pass


UNFINISHED = (
    "process 0 dropped a connection: it ended before it had said who it is; further "
    "ones are not logged"
)
FOREIGN = (
    "process 0 dropped a connection: it speaks another protocol, or to another key "
    "than this process has; further ones are not logged"
)
UNKNOWN = (
    "process 0 dropped a connection: its key is none of this run's; further ones are "
    "not logged"
)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"", UNFINISHED),
        (b"GET / HTTP/1.1\r\n\r\n", UNFINISHED),
        (b"\xff" * 1000, FOREIGN),
        (GREETING, UNFINISHED),
        (GREETING + OVERSIZED_FRAME, UNFINISHED),
        (GREETING + b"\x04\x06\x05HELLO", FOREIGN),
    ],
    ids=["nothing", "http", "ones", "greeting", "oversized frame", "false hello"],
)
def test_a_program_that_is_no_peer_is_dropped(mails, warnings, data, line):
    for i in range(5):
        throw(mails[0].address, data)
        mails[1].send(0, "count", i)
    assert [letter.body for letter in collect(mails[0], 5)] == list(range(5))
    assert warnings(1) == [line]


def test_ten_thousand_random_messages_are_dropped(mails, warnings):
    """Over a hundred connections, some of them past the greeting."""
    chance = random.Random(0)
    for i in range(100):
        messages = [chance.randbytes(chance.randrange(1, 200)) for _ in range(100)]
        throw(mails[0].address, chance.choice((b"", GREETING)) + b"".join(messages))
        mails[1].send(0, "count", i)
    assert [letter.body for letter in collect(mails[0], 100)] == list(range(100))
    assert mails[0].receive() == []
    assert set(warnings(2)) == {UNFINISHED, FOREIGN}
    assert len(warnings(2)) == 2


def test_an_unknown_key_is_refused(mails, warnings, dealer):
    """Its owner knows this process's public key, as everybody may."""
    for _ in range(2):
        dealer(mails[0].address, zmq.curve_keypair()).send(b"let me in")
    mails[1].send(0, "hello", ())
    collect(mails[0], 1)
    assert warnings(1) == [UNKNOWN]
    mails[0].wait(0.2)
    assert mails[0].receive() == []


def test_who_takes_this_process_for_another_is_refused(mails, warnings, dealer):
    keys, (elsewhere, _) = zmq.curve_keypair(), zmq.curve_keypair()
    dealer(mails[0].address, keys, elsewhere).send(b"let me in")
    assert warnings(1) == [FOREIGN]
    assert mails[0].receive() == []


def test_who_brings_no_key_is_refused(mails, warnings, dealer):
    """Which of the two lines it is depends on who hangs up first."""
    dealer(mails[0].address).send(b"let me in")
    (line,) = warnings(1)
    assert line in (UNFINISHED, FOREIGN)
    mails[1].send(0, "hello", ())
    assert [letter.kind for letter in collect(mails[0], 1)] == ["hello"]


def test_a_peer_that_leaves_is_no_stranger(open_mail, caplog):
    one, two = open_mail(0), mail.Mail(1, "run")
    addresses = [one.address, two.address]
    one.introduce(addresses)
    two.introduce(addresses)
    two.send(0, "goodbye", ())
    collect(one, 1)
    two.close()
    one.wait(0.2)
    assert not caplog.records


def envelope(*, version=codec.VERSION, run="run", number=0, kind="forged", sizes=()):
    return msgpack.packb((version, run, False, number, kind, (), sizes))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b""], "it is not msgpack: "),
        ([b"\xc1 garbage"], "it is not msgpack: "),
        ([msgpack.packb({"kind": "forged"})], "it has no envelope: {'kind': 'forged'}"),
        ([msgpack.packb([1, "run"])], "it has no envelope: (1, 'run')"),
        ([envelope(sizes=[-1])], "it has no envelope: (1, 'run', False, 0, 'forged'"),
        ([envelope(version=2)], "its version is not 1: 2"),
        ([envelope(run="old")], "it is of another run than 'run': 'old'"),
        ([envelope(sizes=[3])], "its frames are not those it announces: []"),
        ([envelope(sizes=[1 << 62])], "its frames are not those it announces: []"),
        ([envelope(), b"more"], "its frames are not those it announces: [4]"),
    ],
)
def test_a_peers_false_letters_are_dropped(rogue, warnings, parts, reason):
    one, peer, false = rogue
    for i in range(3):
        false.send_multipart(parts)
        peer.send(0, "count", i)
    false.send(envelope(kind="true"))  # the last of its connection: all came
    letters = collect(one, 4)
    assert [x.body for x in letters if x.sender == 1] == [0, 1, 2]
    assert [x.kind for x in letters if x.sender == 2] == ["true"]
    (line,) = warnings(1)
    assert line.startswith(f"process 0 dropped a letter of process 2: {reason}")
    assert line.endswith("; further ones are not logged")


def test_each_reason_of_a_peer_is_logged_once(rogue, warnings):
    """Whatever the values, and however often."""
    one, _, false = rogue
    for i in range(100):
        false.send(b"\xa5%05d rest" % i)
        false.send(envelope(run=f"run {i}"))
    false.send(envelope(kind="true"))
    collect(one, 1)
    assert len(warnings(2)) == 2


def test_a_sender_is_who_has_the_key_whatever_it_says(rogue):
    one, _, false = rogue
    false.send(envelope(kind="from process 1, honestly"))
    assert collect(one, 1)[0].sender == 2


def test_lost_letters_are_noticed(rogue, warnings):
    one, _, false = rogue
    for number in (0, 1, 4, 5, 9):
        false.send(envelope(number=number))
    collect(one, 5)
    assert warnings(1) == [
        "process 0 misses letters of process 2, from its number 2 to its number 4: a "
        "connection broke; further ones are not logged"
    ]


def test_an_oversized_frame_breaks_the_connection_and_a_new_one_is_made(
    rogue, warnings
):
    """What libzmq had taken is lost with it. Other connections are not touched."""
    one, peer, false = rogue
    false.send(envelope())
    collect(one, 1)
    false.send(bytes(mail.CHUNK_BYTES * 2))
    numbers, senders = itertools.count(2), set()
    while senders != {1, 2}:
        peer.send(0, "hello", ())
        false.send(envelope(number=next(numbers)))
        one.wait(0.1)
        senders |= {letter.sender for letter in one.receive()}
    assert warnings(1)[0].startswith("process 0 misses letters of process 2, from its")
