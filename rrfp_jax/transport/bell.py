"""A bell that any thread may ring, for a thread that sleeps on file descriptors."""

import contextlib
import socket


class Bell:
    """Readable, for `select` and its like, from the first ring until it is silenced.

    A ring before the sleep is not lost: the sleep then ends at once.
    """

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._here.setblocking(False)
        self._there.setblocking(False)

    def fileno(self) -> int:
        """Returns what to sleep on."""
        return self._here.fileno()

    def ring(self) -> None:
        """Ends the sleep. From any thread; does nothing when it rings, or is closed."""
        with contextlib.suppress(OSError):
            self._there.send(b"!")

    def silence(self) -> None:
        """Ends all rings so far."""
        with contextlib.suppress(BlockingIOError):
            while self._here.recv(4096):
                pass

    def close(self) -> None:
        """Gives the descriptors back."""
        self._here.close()
        self._there.close()
