"""Cases C19, C21 and C22: any order and delay, runaway forwards, the smallest limit."""

import itertools
import random

import pytest

from rrfp_jax import Emulation, Policy
from rrfp_jax.core import order_csv, policies
from rrfp_jax.core import trace as trace_lib
from rrfp_jax.errors import ConfigError
from rrfp_jax.sim import costs
from tests.runtime import scripted, toys

COUNT = 4
KNOBS = list(itertools.product([1, 2, 3, 4], [1, 2, 3], policies.PRESSURES))


def shuffled(graph, path, seed):
    """Writes an order of every rank's tasks that means nothing; returns the path."""
    draw = random.Random(seed)
    tasks = [graph.tasks(rank) for rank in range(graph.num_ranks)]
    path.write_text(order_csv.to_csv([draw.sample(own, len(own)) for own in tasks]))
    return str(path)


def run(name, policy):
    pipeline = toys.compiled(name)
    pipeline.policy = policy
    return pipeline.run(toys.TOYS[name].params(), toys.microbatches_of(COUNT))


def check(name, result, policy):
    toys.assert_close((result.loss, list(result.grads)), toys.expected(name, COUNT))
    assert len(result.trace.spans) == len(result.trace.graph.tasks())
    fresh = policies.dispatchers(result.trace.graph, policy)
    assert trace_lib.replay(result.trace, fresh) == result.trace.launches()


@pytest.mark.parametrize("part", range(8))
def test_c19_gradients_do_not_depend_on_hint_or_delay(part, use_script, tmp_path):
    """200 absurd hints on as many delay patterns; the limit holds in each."""
    graph = toys.compiled("three").graph([()] * COUNT)
    draw = random.Random(part)
    for seed in range(25 * part, 25 * part + 25):
        path = shuffled(graph, tmp_path / "order.csv", seed)
        limit, ahead, pressure = draw.choice(KNOBS)
        use_script(scripted.at_random(seed))
        policy = Policy(
            path, in_flight_limit=limit, back_pressure=pressure, launch_ahead=ahead
        )
        result = run("three", policy)
        check("three", result, policy)
        bound = limit + (pressure == "one_by_one")  # the paper's rule, plus one stage
        assert max(result.trace.peak_in_flight()) <= bound


@pytest.mark.parametrize("name", toys.TOYS)
def test_c19_the_same_holds_on_every_topology(name, use_script, tmp_path):
    graph = toys.compiled(name).graph([()] * COUNT)
    for seed in range(6):
        path = shuffled(graph, tmp_path / "order.csv", seed)
        hint = path if seed % 2 else policies.RULES[seed // 2]
        use_script(scripted.at_random(seed))
        policy = Policy(hint, in_flight_limit=seed % 3 + 1)
        result = run(name, policy)
        check(name, result, policy)
        assert max(result.trace.peak_in_flight()) <= seed % 3 + 1


@pytest.mark.parametrize("name", toys.TOYS)
def test_c22_a_limit_of_one_finishes_whatever_arrives_first(name, use_script):
    choices = itertools.product(policies.RULES, policies.PRESSURES)
    for seed, (hint, pressure) in enumerate(choices):
        use_script(scripted.at_random(seed))
        policy = Policy(hint, in_flight_limit=1, back_pressure=pressure)
        result = run(name, policy)
        check(name, result, policy)
        if pressure == "reserving":
            assert result.trace.peak_in_flight() == [1] * result.trace.graph.num_ranks


def test_c22_a_limit_of_zero_is_a_config_error():
    with pytest.raises(ConfigError, match="in_flight_limit=0"):
        Policy(in_flight_limit=0)


def one_slow_stage(graph):
    """Milliseconds a task, 100 times as many on the last stage."""
    seconds = [0.001] * (graph.num_stages - 1) + [0.1]
    return costs.constant(graph, seconds, seconds)


@pytest.mark.parametrize("hint", policies.RULES)
def test_c21_a_slow_last_stage_does_not_fill_the_first(hint, virtual_time):
    """M = 64, limit 6: stage 0 never holds more than 6, and does reach 6."""
    pipeline, toy = toys.compiled("one_each"), toys.TOYS["one_each"]
    pipeline.policy = Policy(hint, in_flight_limit=6)
    pipeline.emulation = Emulation(one_slow_stage)
    try:
        result = pipeline.run(toy.params(), toys.microbatches_of(64))
    finally:
        pipeline.emulation = None
    assert result.trace.peak_in_flight()[0] == 6
    assert virtual_time.now_s > 64 * 0.2
    toys.assert_close((result.loss, list(result.grads)), toys.expected("one_each", 64))
