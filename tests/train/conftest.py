"""Training tests compile the same tiny programs many times: once is enough.

XLA's optimisations are off (the programs are tiny) and compiled programs are shared by
the session's trainers. Neither can make two different results equal.
"""

import pathlib
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

_CHEAP = {
    "jax_disable_most_optimizations": True,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("programs")


@pytest.fixture(autouse=True, scope="module")
def cheap_compiling(programs: pathlib.Path) -> Iterator[None]:
    changed = {**_CHEAP, "jax_compilation_cache_dir": str(programs)}
    before = {name: jax.config.values[name] for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # else JAX keeps the answer of its first look
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
