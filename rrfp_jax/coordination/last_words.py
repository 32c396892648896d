"""What a process says last, and how it leaves: also when C++ ends it.

The last line is the first cause, whole: whoever reads a log, or a program, looks there.

JAX's coordination service aborts every process when process 0, where it lives, is gone:
from one of its own threads, with its own message. The abort cannot be prevented, but it
can be made to wait: the handler here runs in the aborting thread, which never comes
back from it, and meanwhile the other threads learn what the first cause was.

The handler takes Python's lock like any other thread, so it works unless the thread
that aborts has broken the interpreter itself.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_LONGEST_LINE = 600  # characters

_kept: list[object] = []  # what C holds pointers to


def leave(text: str, status: int) -> NoReturn:
    """Prints a text as one line, and exits at once.

    An orderly end would wait for those that are gone. That nothing can be printed, as
    where the disk of the log is full, keeps nobody here.
    """
    try:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        line = " ".join(text.split())
        if len(line) > _LONGEST_LINE:
            sys.stderr.write(f"{text}\n")
            half = _LONGEST_LINE // 2
            line = f"{line[:half]} ... {line[-half:]}"
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
    finally:
        os._exit(status)


def on_abort(find_words: Callable[[], str]) -> None:
    """On SIGABRT, prints what `find_words` returns, last of all, and exits with 1.

    Args:
      find_words: may take its time; called once, in the thread that aborts.
    """
    has_begun = False

    @ctypes.CFUNCTYPE(None, ctypes.c_int)  # type: ignore[untyped-decorator]
    def handler(_: int) -> None:
        nonlocal has_begun
        if has_begun:  # while looking for words
            os._exit(1)
        has_begun = True
        try:
            leave(find_words(), 1)
        finally:
            os._exit(1)

    _kept.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
