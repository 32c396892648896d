"""Driving steps to their end."""

import gc

import pytest

from rrfp_jax.runtime.driving import drive


class Scripted:
    """An executor of three events that notes whether the collector could run."""

    wire = None

    def __init__(self, fails=False):
        self.seen = []
        self.fails = fails

    @property
    def is_done(self):
        return len(self.seen) == 3

    def start(self):
        assert not self.seen

    def advance(self):
        self.seen.append(gc.isenabled())
        if self.fails:
            raise RuntimeError("a program has failed")
        return True


def test_the_cycle_collector_waits_until_the_step_has_ended():
    """A full collection among JAX's programs was seen to stop all ranks for 80 ms."""
    assert gc.isenabled()
    executor = Scripted()
    drive([executor])
    assert executor.seen == [False] * 3
    assert gc.isenabled()


def test_a_step_that_fails_gives_the_collector_back():
    with pytest.raises(RuntimeError, match="a program has failed"):
        drive([Scripted(fails=True)])
    assert gc.isenabled()
