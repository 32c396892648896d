"""Mail between processes that are all in this one, and ends of a transport."""

import socket
import time

import pytest
import zmq

from rrfp_jax.transport.mail import Address, Mail
from tests.transport import nodes

PATIENCE_S = 30.0  # how long a test waits in vain; no assertion depends on it


def collect(mail, count):
    """Returns the next `count` letters."""
    found, deadline_s = [], time.monotonic() + PATIENCE_S
    while len(found) < count:
        assert time.monotonic() < deadline_s, f"{len(found)} of {count} letters came"
        mail.wait(0.1)
        found += mail.receive()
    assert len(found) == count
    return found


@pytest.fixture
def open_mail():
    """Opens the mail of a process; closes all in the end."""
    opened = []

    def open_one(process, run_id="run", host="127.0.0.1"):
        opened.append(Mail(process, run_id, host))
        return opened[-1]

    yield open_one
    for mail in opened:
        mail.close()


@pytest.fixture
def mails(open_mail):
    """Three processes that know each other."""
    opened = [open_mail(process) for process in range(3)]
    for mail in opened:
        mail.introduce([each.address for each in opened])
    return opened


@pytest.fixture
def dealer():
    """Connects a ZeroMQ socket of no `Mail` to one; closes all in the end."""
    context = zmq.Context()
    sockets = []

    def connect(address, keys=None, server_key=None):
        one = context.socket(zmq.DEALER)
        one.linger = 0
        if keys is not None:
            one.curve_publickey, one.curve_secretkey = keys
            one.curve_serverkey = server_key or address.public_key.encode()
        one.connect(address.endpoint)
        sockets.append(one)
        return one

    yield connect
    for each in sockets:
        each.close()
    context.term()


@pytest.fixture
def rogue(open_mail, dealer):
    """Process 0, a peer that behaves, and a socket with the key of process 2."""
    one, peer = open_mail(0), open_mail(1)
    keys = zmq.curve_keypair()
    addresses = [one.address, peer.address, Address("tcp://-:1", keys[0].decode())]
    one.introduce(addresses)
    peer.introduce(addresses)
    return one, peer, dealer(one.address, keys)


@pytest.fixture(scope="module")
def alone():
    """A node that is both ends."""
    node = nodes.Node()
    yield node
    node.close()


@pytest.fixture(scope="module")
def pair():
    """Two nodes, each in a process of its own with two devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    both = [nodes.Far(process, 2, coordinator) for process in range(2)]
    try:
        addresses = [node.address() for node in both]
        for node in both:
            node.introduce(addresses)
        yield both
    finally:
        for node in reversed(both):
            node.close()
