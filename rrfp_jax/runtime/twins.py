"""Programs that are alike are compiled one after another, where JAX keeps them.

JAX's cache of compiled programs writes its entries in place: a thread that looks for a
program while another writes it reads half of it, warns, and compiles it again. Stages
of one rank are often alike (the inner ones of an interleaved or V-shaped placement),
and are compiled in parallel. So each waits for its twin, and then finds it whole, which
is also less work than to compile it twice.
"""

import threading
import weakref
from typing import Any

import jax

_guard = threading.Lock()
_locks: weakref.WeakValueDictionary[Any, threading.Lock] = weakref.WeakValueDictionary()


def compile_lowered(lowered: jax.stages.Lowered, mesh: jax.sharding.Mesh) -> Any:
    """Returns the executable of a lowered program. Thread-safe.

    Args:
      lowered: the program.
      mesh: the devices that it is for; programs for others are other programs.
    """
    if jax.config.values["jax_compilation_cache_dir"] is None:
        return lowered.compile()
    # Equal hashes of programs that are not equal would cost a wait, and no more.
    key = hash(lowered.as_text()), mesh
    with _guard:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        return lowered.compile()
