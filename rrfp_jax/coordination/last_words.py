"""What a process says when C++ ends it.

JAX's coordination service aborts every process when process 0, where it lives, is gone:
from one of its own threads, with its own message. The abort cannot be prevented, but it
can be made to wait: the handler here runs in the aborting thread, which never comes
back from it, and meanwhile the other threads learn what the first cause was.

The handler takes Python's lock like any other thread, so it works unless the thread
that aborts has broken the interpreter itself.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_kept: list[object] = []  # what C holds pointers to


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
            sys.stderr.write(f"{find_words()}\n")
            sys.stderr.flush()
        finally:
            os._exit(1)

    _kept.append(handler)
    libc = ctypes.CDLL(None)
    libc.signal.restype = ctypes.c_void_p
    libc.signal(signal.SIGABRT, handler)
