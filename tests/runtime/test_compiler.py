"""Everything is compiled ahead, once, and nothing that was not declared is run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from rrfp_jax import Pipeline, Policy, Stage, split
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import executor as executor_lib
from tests.runtime import toys

COMPILED = "/jax/core/compile/backend_compile_duration"


TWO = toys.chain_of([0, 1])


@pytest.fixture
def compilations():
    """The names of the programs that XLA compiles from here on."""
    found = []

    def listen(event, duration, **kwargs):
        if event == COMPILED:
            found.append(kwargs.get("fun_name"))

    monitoring.register_event_duration_secs_listener(listen)
    yield found
    monitoring.unregister_event_duration_listener(listen)


@pytest.fixture
def fresh():
    """A pipeline that has compiled nothing."""
    return TWO.pipeline()


def on_shapes(microbatches):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), microbatches
    )


def test_compiling_ahead_leaves_no_stage_program_to_the_step(fresh, compilations):
    """Declared by shapes alone; the step then compiles no forward and no backward."""
    microbatches, params = toys.microbatches_of(2), TWO.params()
    assert fresh.num_uncompiled(on_shapes(microbatches)) == 2
    reports = []
    fresh.compile(on_shapes(microbatches), report=lambda: reports.append(1))
    assert len(reports) == fresh.compiler.num_programs == 2
    assert fresh.num_uncompiled(on_shapes(microbatches)) == 0
    of_stages = [n for n in compilations if "forward" in n or "backward" in n]
    assert len(of_stages) == 4  # a forward and a backward each
    del compilations[:]
    fresh.run(params, microbatches)
    assert not [n for n in compilations if "forward" in n or "backward" in n]
    del compilations[:]
    fresh.run(params, toys.microbatches_of(3))
    assert compilations == []
    assert fresh.compiler.num_programs == 2


def test_compiling_ahead_leaves_nothing_to_the_first_step(fresh, compilations):
    fresh.compile(toys.microbatches_of(2))
    del compilations[:]
    fresh.run(TWO.params(), toys.microbatches_of(2))
    assert compilations == []


def test_nothing_is_compiled_after_the_first_launch(compilations, monkeypatch):
    """A lazy compile in one process of several is a classic hang."""
    params = TWO.params()
    tied = TWO.pipeline(tied=[((0, "w"), (1, "w"))])
    launched = []
    launch = executor_lib.Executor._launch

    def note(self, task):
        if not launched:
            del compilations[:]
        launched.append(task)
        launch(self, task)

    monkeypatch.setattr(executor_lib.Executor, "_launch", note)
    tied.run(params, toys.microbatches_of(2))
    assert launched
    assert compilations == []


def test_c03_nothing_is_launched_before_all_is_compiled(monkeypatch, compilations):
    """Also without a call of `compile`."""
    seen = []
    launch = executor_lib.Executor._launch

    def note(self, task):
        seen.append((task, len(compilations)))
        launch(self, task)

    monkeypatch.setattr(executor_lib.Executor, "_launch", note)
    pipeline = TWO.pipeline()
    pipeline.run(TWO.params(), toys.microbatches_of(1))
    assert len(seen) == 4
    assert {count for _, count in seen} == {len(compilations)}
    assert len(compilations) >= 4


def test_evaluation_compiles_its_own_programs_ahead(fresh, compilations):
    microbatches, params = toys.microbatches_of(2), TWO.params()
    assert fresh.num_uncompiled(microbatches, backward=False) == 2
    fresh.compile(microbatches, backward=False)
    assert len(compilations) == 2  # forwards alone
    fresh.run(params, microbatches, backward=False)
    assert len(compilations) == 2


def test_a_sealed_compiler_refuses_what_was_not_declared(fresh):
    """Naming the shapes; what was declared still runs."""
    declared, params = toys.microbatches_of(2), TWO.params()
    fresh.compile(declared)
    fresh.compiler.is_sealed = True
    fresh.run(params, declared)
    longer = split(toys.batch_of(10), 2)
    with pytest.raises(ConfigError, match=r"\(5, 4\).*not declared.*\n.*bucket"):
        fresh.run(params, longer)
    with pytest.raises(ConfigError, match="not declared"):
        fresh.run(params, declared, backward=False)
    assert fresh.compiler.num_programs == 2


def test_microbatches_of_one_shape_share_their_programs():
    """Whatever they skip: only a stage whose own inputs differ gets another program."""

    def source(params, inputs, feed):
        return params["w"] * feed

    def join(params, inputs, feed):
        return sum(i.sum() for i in inputs if i is not None)

    params = [{"w": np.float32(1)}, {"w": np.float32(2)}, {}]
    select = {"select": lambda m: m["x"]}
    pipeline = Pipeline(
        [Stage(source, **select), Stage(source, **select), Stage(join, **select)],
        params,
        edges=((0, 2), (1, 2)),
        skips=lambda m: m["skips"],
    )
    x = np.ones(2, np.float32)
    both, one = {"x": x, "skips": ()}, {"x": x, "skips": (0,)}
    assert pipeline.run(params, [both, both, one, both, one]).loss == 3 * 6 + 2 * 4
    # Stage 0, stage 1, and a join for two sources and for one.
    assert pipeline.compiler.num_programs == 4


def test_what_is_skipped_distinguishes_plans_without_backward_and_feed():
    def source(params, inputs, feed):
        return params["w"] * jnp.ones(2)

    def join(params, inputs, feed):
        return sum(i.sum() for i in inputs if i is not None)

    params = [{"w": np.float32(1)}, {"w": np.float32(2)}, {}]
    stages = [Stage(fn, select=lambda m: None) for fn in (source, source, join)]
    pipeline = Pipeline(stages, params, edges=((0, 2), (1, 2)), skips=lambda m: m)
    result = pipeline.run(params, [(), (0,), (1,)], backward=False)
    assert result.losses == (6.0, 4.0, 2.0)


def test_a_static_leaf_distinguishes_programs():
    def scaled(params, inputs, feed):
        assert isinstance(feed["n"], int)
        return params["w"] * feed["x"].sum() * feed["n"]

    params = [{"w": np.float32(2)}]
    pipeline = Pipeline([scaled], params)
    x = np.ones(2, np.float32)
    result = pipeline.run(params, [{"x": x, "n": n} for n in (1, 5, 1)])
    assert result.losses == (4.0, 20.0, 4.0)
    assert pipeline.compiler.num_programs == 2


@pytest.mark.parametrize(("first", "second"), [(2, 2.0), (1, True), (0.0, -0.0)])
def test_equal_static_leaves_of_different_types_are_different(first, second):
    """int8 x 2 wraps around, int8 x 2.0 does not."""

    def scaled(params, inputs, feed):
        kind = type(feed["n"]).__name__ + str(feed["n"])
        return params["w"] * feed["x"].sum() * sum(map(ord, kind))

    params, x = [{"w": np.float32(2)}], np.ones(2, np.float32)
    pipeline = Pipeline([scaled], params)
    both = pipeline.run(params, [{"x": x, "n": n} for n in (first, second)])
    alone = Pipeline([scaled], params).run(params, [{"x": x, "n": second}])
    assert both.losses[1] == alone.loss


def test_an_error_while_tracing_names_the_stage():
    def broken(params, inputs, feed):
        return inputs @ feed["x"][:3]

    params = toys.TOYS["three"].params()
    pipeline = Pipeline([toys.hidden, broken, toys.loss], params)
    with pytest.raises(TypeError) as error:
        pipeline.compile(toys.microbatches_of(1))
    assert "while tracing stage 1" in error.value.__notes__


def test_a_policy_that_does_not_fit_is_refused_before_anything_compiles(fresh):
    fresh.policy = Policy("gpipe", "fixed", in_flight_limit=2)
    with pytest.raises(ConfigError, match="holds 3 microbatches in flight"):
        fresh.check(3)
    with pytest.raises(ConfigError, match="holds 3 microbatches in flight"):
        fresh.run(TWO.params(), toys.microbatches_of(3))
    assert fresh.compiler.num_programs == 0


def test_tracing_runs_each_stage_once_a_signature(compilations):
    calls = []

    def counted(params, inputs, feed):
        calls.append(1)
        return toys.loss(params, inputs, feed)

    params = toys.chain_of([0]).params()
    pipeline = Pipeline([Stage(counted)], params)
    for count in (1, 3, 2):
        pipeline.run(params, toys.microbatches_of(count))
    assert len(calls) == 1
