"""Who may connect: the ZAP handler of a ZeroMQ context, and the log of its refusals.

It has a thread of its own, for a handshake must not wait: the thread that reads the
letters may be compiling for minutes, and libzmq gives up on a handshake after 30 s.
Between handshakes the thread sleeps.

A connection is refused in three ways, and each is logged once: whoever scans ports
must not fill the disk. libzmq tells of the third way, that of a program that speaks no
ZeroMQ at all, only by closing: no handshake has succeeded between the opening of this
connection and its end. So such a refusal may be missed while others shake hands, and no
peer that leaves is ever taken for one.
"""

import struct
import threading
from collections.abc import Mapping
from typing import Any

import zmq
from absl import logging
from zmq.utils import z85

from rrfp_jax.transport.bell import Bell

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # RFC 27: where libzmq asks
_MONITOR_ENDPOINT = "inproc://guard"
_DOMAIN = b"rrfp_jax"
_UNKNOWN_KEY = "its key is none of this run's"
_FOREIGN = "it speaks another protocol, or to another key than this process has"
_UNFINISHED = "it ended before it had said who it is"


class Guard:
    """Lets the processes of a run connect to one socket, and nobody else.

    Until `admit` is called no handshake is answered, neither with yes nor with no: a
    refused peer would not come again.
    """

    def __init__(self, context: zmq.Context[Any], process: int) -> None:
        """Answers for `context`, in which `process` is about to open its socket."""
        self._process = process
        self._context = context
        self._numbers: dict[bytes, int] = {}  # process of a public key
        self._bell = Bell()
        self._thread: threading.Thread | None = None
        # Of the monitored connections: the successes there had been when each opened.
        self._opened: dict[int, int] = {}
        self._num_succeeded = 0
        self._num_explained = 0  # failures that were logged and have not yet closed
        self._logged: set[str] = set()
        self._zap = context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.linger = 0
        self._monitor.rcvhwm = 0  # a full one would stop libzmq's thread

    def watch(self, inbox: zmq.Socket[bytes]) -> None:
        """Makes `inbox` ask this guard, before it is bound."""
        inbox.zap_domain = _DOMAIN
        inbox.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # never open for want of a guard
        inbox.monitor(
            _MONITOR_ENDPOINT,
            zmq.EVENT_ACCEPTED
            | zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH,
        )
        self._monitor.connect(_MONITOR_ENDPOINT)

    def admit(self, numbers: Mapping[bytes, int]) -> None:
        """Begins to answer: these public keys, in z85, are these processes."""
        self._numbers = dict(numbers)
        self._thread = threading.Thread(
            target=self._run, name="mail-guard", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Ends the thread. To be called when the inbox is closed."""
        if self._thread is not None:
            self._bell.ring()
            self._thread.join()
        self._zap.close()
        self._monitor.close()
        self._bell.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in (self._zap, self._monitor, self._bell.fileno()):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._zap in ready:
                self._answer()
            if self._monitor in ready:
                self._note(*self._monitor.recv_multipart())
            if self._bell.fileno() in ready:
                return

    def _answer(self) -> None:
        """Answers one question of libzmq's (RFC 27): who has this key?"""
        version, request, _, _, _, _, key = self._zap.recv_multipart()
        number = self._numbers.get(z85.encode(key))
        verdict = (b"400", b"unknown key", b"")
        if number is not None:
            verdict = (b"200", b"", b"%d" % number)
        self._zap.send_multipart((version, request, *verdict, b""))

    def _note(self, fact: bytes, endpoint: bytes) -> None:
        """Notes one event of the monitor (zmq_socket_monitor)."""
        event, value = struct.unpack("=hi", fact)
        match event:
            case zmq.EVENT_ACCEPTED:
                self._opened[value] = self._num_succeeded
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._num_succeeded += 1
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._refuse(_UNKNOWN_KEY)
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                self._refuse(_FOREIGN)
            case zmq.EVENT_DISCONNECTED:
                opened = self._opened.pop(value, None)
                if self._num_explained:
                    self._num_explained -= 1
                elif opened == self._num_succeeded:
                    self._log(_UNFINISHED)

    def _refuse(self, reason: str) -> None:
        self._num_explained += 1
        self._log(reason)

    def _log(self, reason: str) -> None:
        if reason not in self._logged:
            self._logged.add(reason)
            logging.warning(
                "process %d dropped a connection: %s; further ones are not logged",
                self._process,
                reason,
            )
