"""Fixtures that replace the runtime's devices by ones that tests control."""

import pytest

from rrfp_jax.runtime import devices, pipeline
from rrfp_jax.transport.in_process import InProcess
from tests.runtime import scripted


@pytest.fixture
def use_script(monkeypatch):
    """Makes every step from here on run on scripted devices that `choose` drives."""

    def use(choose):
        monkeypatch.setattr(
            pipeline,
            "RealDevices",
            lambda graph, transport: scripted.Scripted(graph, choose),
        )

    return use


@pytest.fixture
def virtual_time(monkeypatch):
    """Makes emulated devices sleep in no time; the clock stops while nobody sleeps."""
    clock = scripted.VirtualTime()
    monkeypatch.setattr(devices, "time", clock)
    return clock


@pytest.fixture
def sent(monkeypatch):
    """The payloads of every message sent from here on: message -> list of arrays."""
    messages = {}

    class Spy(InProcess):
        def send(self, message, payload, shardings):
            super().send(message, payload, shardings)
            messages[message] = list(self._payloads[message])

    monkeypatch.setattr(pipeline, "InProcess", Spy)
    return messages
