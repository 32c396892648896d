"""Stages of one rank that are alike are compiled once, and found whole by others."""

import collections
import concurrent.futures
import contextlib
import threading

import jax
import pytest
from jax import monitoring
from jax.experimental.compilation_cache import compilation_cache

from rrfp_jax.runtime.twins import compile_lowered
from tests.runtime import toys

HIT, MISS = (f"/jax/compilation_cache/cache_{what}" for what in ("hits", "misses"))


@contextlib.contextmanager
def keeping(folder):
    changed = {
        "jax_compilation_cache_dir": folder,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # else JAX keeps the answer of its first look
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def kept(tmp_path):
    """A folder in which JAX keeps every compiled program."""
    with keeping(str(tmp_path)):
        yield tmp_path


@pytest.fixture
def looks():
    """How often JAX looked for a program and found it, or did not."""
    found = collections.Counter()

    def listen(event, **kwargs):
        found[event] += 1

    monitoring.register_event_listener(listen)
    yield found
    monitoring.unregister_event_listener(listen)


def test_each_program_of_a_rank_of_twins_is_compiled_once(kept, looks):
    """Eight stages on one rank: six inner ones that are alike."""
    toys.chain_of([0] * 8).pipeline().compile(toys.microbatches_of(2))
    of_stages = [
        path
        for path in kept.glob("*-cache")
        if path.name.startswith(("jit_forward", "jit_backward"))
    ]
    # First, inner and last stage; the first one's forward is an inner one's.
    assert len(of_stages) == 5
    assert looks[MISS] == len([*kept.glob("*-cache")])
    assert looks[HIT] >= 16 - 5


class Slow:
    """A lowered program whose compilation waits for another to begin."""

    inside = 0
    most = 0

    def __init__(self, text):
        self.text = text

    def as_text(self):
        return self.text

    def compile(self):
        with changed:
            Slow.inside += 1
            Slow.most = max(Slow.most, Slow.inside)
            changed.notify_all()
            changed.wait_for(lambda: Slow.most > 1, timeout=0.2)
            Slow.inside -= 1
        return self.text


changed = threading.Condition()


@pytest.mark.parametrize(
    ("texts", "devices", "at_once"),
    [("aa", (0, 0), 1), ("ab", (0, 0), 2), ("aa", (0, 1), 2)],
    ids=["twins", "different programs", "different devices"],
)
def test_only_twins_wait_for_each_other(kept, texts, devices, at_once, monkeypatch):
    monkeypatch.setattr(Slow, "most", 0)
    meshes = [jax.make_mesh((1,), "x", devices=[jax.devices()[d]]) for d in devices]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [*pool.map(compile_lowered, map(Slow, texts), meshes)] == [*texts]
    assert Slow.most == at_once


def test_where_nothing_is_kept_nobody_waits(monkeypatch):
    """Twins would only be compiled later, not less often."""
    monkeypatch.setattr(Slow, "most", 0)
    mesh = jax.make_mesh((1,), "x", devices=jax.devices()[:1])
    with keeping(None), concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [*pool.map(compile_lowered, map(Slow, "aa"), [mesh] * 2)] == ["a", "a"]
    assert Slow.most == 2
