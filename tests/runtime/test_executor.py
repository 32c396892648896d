"""What the executor says when a step cannot go on."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import Emulation, Pipeline
from rrfp_jax.core import policies
from rrfp_jax.core.dispatcher import Dispatcher
from rrfp_jax.core.policies import Policy
from rrfp_jax.errors import InvariantError, StallError
from rrfp_jax.sim import costs
from tests.runtime import toys


class Withholding:
    """An arbiter that lets `count` tasks go and then nothing, ever."""

    def __init__(self, count):
        self._count = count
        self._ready = []
        self.add = self._ready.append

    def choose(self):
        return self._ready[0] if self._count and self._ready else None

    def launched(self, task):
        self._count -= 1
        self._ready.remove(task)

    def ready(self):
        return self._ready

    def why_held(self, task):
        return f"{task} held by a whim"


@pytest.mark.parametrize("emulation", [None, "virtual"])
def test_a_step_that_cannot_go_on_says_who_waits_for_what(
    monkeypatch, emulation, virtual_time
):
    """It neither hangs nor returns; on real devices as on emulated ones."""

    def withholding(graph, *_):
        return [
            Dispatcher(graph, rank, Withholding(3 if rank == 0 else 99), 2)
            for rank in range(graph.num_ranks)
        ]

    monkeypatch.setattr(policies, "dispatchers", withholding)
    pipeline = toys.compiled("three")
    if emulation:
        pipeline.emulation = Emulation(lambda graph: costs.constant(graph, 1.0, 2.0))
    try:
        with pytest.raises(StallError) as error:
            pipeline.run(toys.TOYS["three"].params(), toys.microbatches_of(2))
    finally:
        pipeline.emulation = None
    assert "rank 0 has 1 tasks left; none running or in transit." in str(error.value)
    assert "held by a whim" in str(error.value)


def test_an_error_in_a_launch_names_task_and_rank_and_the_next_step_works():
    def broken(x):
        if x > 2:
            raise ZeroDivisionError("x is too large")
        return x

    def checked(params, inputs, feed):
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        safe = jax.lax.stop_gradient(inputs)
        return inputs * 0 + jax.pure_callback(broken, shape, safe)

    params = [{"w": np.float32(1)}, {}]
    pipeline = Pipeline([lambda p, i, f: p["w"] * f["x"], checked], params)
    good = [{"x": np.float32(1)}, {"x": np.float32(2)}]
    assert pipeline.loss_and_grad(params, good)[0] == 3.0
    with pytest.raises(jax.errors.JaxRuntimeError, match="x is too large") as error:
        pipeline.run(params, [{"x": np.float32(1)}, {"x": np.float32(3)}])
    assert "while launching 1F1 on rank 1" in error.value.__notes__
    assert pipeline.loss_and_grad(params, good)[0] == 3.0


def test_an_arrival_told_twice_is_an_invariant_error(use_script):
    """The dispatcher refuses what a broken transport would report."""
    delivered = []

    def choose(events):
        found = [e for e in delivered if len(e) == 2]
        event = found[0] if found else events[0]
        delivered.append(event)
        return event

    use_script(choose)
    pipeline = toys.compiled("three")
    pipeline.policy = Policy()
    with pytest.raises(InvariantError, match="0F0 came to 1F0 twice"):
        pipeline.run(toys.TOYS["three"].params(), toys.microbatches_of(2))


def test_flags_are_given_for_every_task():
    pipeline, params = toys.compiled("three"), toys.TOYS["three"].params()
    pipeline.policy = Policy()
    result = pipeline.run(params, toys.microbatches_of(2))
    assert set(result.flags) == set(result.trace.graph.tasks())
    assert all(map(bool, result.flags.values()))
    assert result.culprit() is None
