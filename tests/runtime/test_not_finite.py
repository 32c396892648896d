"""Case C10, the library's part: the flags name the task that was not finite first."""

import jax.numpy as jnp
import numpy as np
import pytest

from rrfp_jax import Pipeline, split
from rrfp_jax.core.task import Kind, Task


def scaled(params, inputs, feed):
    return params["w"] * feed["x"]


def explode(stage):
    """A stage that multiplies by w, and by infinity where the feed says so."""

    def fn(params, inputs, feed):
        x = feed["x"] if inputs is None else inputs
        y = jnp.where(feed["explode_at"] == stage, jnp.inf, 1.0) * params["w"] * x
        return jnp.sum(y) if stage == 2 else y

    return fn


@pytest.fixture(scope="module")
def explosive():
    return Pipeline([explode(s) for s in range(3)], [{"w": np.float32(2)}] * 3)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_c10_the_flags_name_the_first_task_that_is_not_finite(
    explosive, stage, use_script
):
    """Microbatch 2 overflows in one forward; all that follows is infinite too."""
    use_script(lambda events: events[0])
    params = [{"w": np.float32(2)}] * 3
    batch = {"x": np.ones(4, np.float32), "explode_at": np.int32([9, 9, stage, 9])}
    result = explosive.run(params, split(batch, 4))
    assert result.culprit() == Task(Kind.F, stage, 2)
    assert not np.isfinite(result.loss)
    batch["explode_at"][:] = 9
    after = explosive.run(params, split(batch, 4))
    assert after.culprit() is None
    assert after.loss == 32.0


def test_c10_a_microbatch_that_ran_after_the_culprit_is_not_blamed(
    explosive, use_script
):
    """The backwards run from microbatch 3 down, so the sum is infinite from 2 on."""
    use_script(
        lambda events: max(
            events, key=lambda e: (hasattr(e, "task"), getattr(e, "source", e)[2:])
        )
    )
    params = [{"w": np.float32(2)}] * 3
    batch = {"x": np.ones(4, np.float32), "explode_at": np.int32([9, 9, 0, 9])}
    result = explosive.run(params, split(batch, 4))
    backwards = [t for t in result.trace.launches()[0] if t.kind is Kind.B]
    assert [t.microbatch for t in backwards].index(2) < 3
    assert result.culprit() == Task(Kind.F, 0, 2)


def test_c10_a_weight_gradient_that_overflows_is_named():
    """Loss and cotangents are finite; 1e25 x 1e15 is too large for the gradient."""

    def last(params, inputs, feed):
        return jnp.sum(params["w"] * inputs * 1e15)

    def middle(params, inputs, feed):
        return params["w"] * inputs

    params = [{"w": np.float32(w)} for w in (1, 1e-20, 1)]
    pipeline = Pipeline([scaled, middle, last], params)
    result = pipeline.run(params, [{"x": np.float32(1e25)}])
    assert np.isfinite(result.loss)
    assert np.isinf(result.grads[1]["w"])
    assert result.culprit() == Task(Kind.B, 1, 0)


def test_c10_a_backward_that_overflows_is_named():
    """The loss is finite; the cotangent of stage 1 is not."""

    def steep(params, inputs, feed):
        return jnp.sum(params["w"] * jnp.sqrt(inputs))  # infinite slope at 0

    params = [{"w": np.float32(2)}, {"w": np.float32(3)}]
    pipeline = Pipeline([scaled, steep], params)
    result = pipeline.run(params, split({"x": np.float32([1, 4, 0, 9])}, 4))
    assert result.loss == pytest.approx(3 * np.sqrt(2) * (1 + 2 + 3))
    assert result.culprit() == Task(Kind.B, 1, 2)
