"""Fixtures that replace the runtime's devices by ones that tests control."""

import pytest

from rrfp_jax.runtime import devices, driving, pipeline
from rrfp_jax.transport.in_process import InProcess
from tests.runtime import scripted


@pytest.fixture
def use_script(monkeypatch):
    """Makes every step from here on run on scripted devices that `choose` drives."""

    def use(choose):
        monkeypatch.setattr(
            pipeline,
            "RealDevices",
            lambda graph, transport, start_s: scripted.Scripted(graph, choose),
        )

    return use


@pytest.fixture
def virtual_time(monkeypatch):
    """Makes emulated devices sleep in no time; the clock stops while nobody sleeps."""
    clock = scripted.VirtualTime()
    for module in (devices, driving, pipeline):
        monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def sent(monkeypatch):
    """The payloads of every message sent from here on: message -> list of arrays."""
    messages = {}

    send = InProcess.send

    def spy(self, message, payload, shardings, due_s=None):
        send(self, message, payload, shardings, due_s)
        messages[message] = list(self._payloads[message])

    monkeypatch.setattr(InProcess, "send", spy)
    return messages
