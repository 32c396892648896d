"""Host time of a task, beside a plain loop of the same calls; and what polling costs.

The pipeline computes next to nothing. All four ranks share the device, where the
`device_put`s of the plain loop move nothing: so the bar is on the time, and the ratio
is only told.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax import Pipeline
from scripts.bench import plain_loop, toy
from scripts.gpu import shared_device, timing
from scripts.gpu.figures import Figure
from scripts.gpu.sizes import Size

NUM_CALLS = 200
BUSY_S = 0.2  # that the device computes while it is polled


def check(size: Size) -> Iterator[Figure | str]:
    """Yields the figures, and what is done before each."""
    yield "tasks"
    yield from _tasks(size)
    yield "polling"
    yield from _polling()


def _tasks(size: Size) -> Iterator[Figure]:
    on_one_device = functools.partial(Pipeline, ranks=shared_device.ranks())
    count = size.tiny_microbatches
    pipeline, params, microbatches = toy.make_pipeline(
        shared_device.NUM_RANKS, count, on_one_device
    )
    calls: dict[str, Callable[[], Any]] = {
        "plain loop": plain_loop.PlainLoop(pipeline, params, microbatches),
        "runtime": lambda: pipeline.run(params, microbatches).grads,
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(size.repeats + 2):
        for name, call in calls.items():
            taken_s = timing.seconds(call)
            if repeat >= 2:  # the first two compile and warm up
                found[name].append(taken_s)
    num_tasks = 2 * shared_device.NUM_RANKS * count
    each_us = {n: statistics.median(t) / num_tasks * 1e6 for n, t in found.items()}
    yield Figure("a task in the plain loop", each_us["plain loop"], "us")
    limit = size.host_limit_us
    yield Figure("a task in the runtime", each_us["runtime"], "us", limit)
    ratio = timing.ratio(found["runtime"], found["plain loop"])
    yield Figure("runtime over plain loop", ratio)


def _polling() -> Iterator[Figure]:
    """Yields what the calls cost that the runtime lives on."""
    small = jax.device_put(jnp.ones((8, 8)), jax.local_devices()[0])
    add = jax.jit(lambda x: x + 1).lower(small).compile()
    there = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    calls: dict[str, Callable[[], Any]] = {
        "launch of a small program": lambda: add(small),
        "device_put to the same device": lambda: jax.device_put(small, there),
        "is_ready of a value that is there": lambda: small.is_ready(),
    }
    for name, call in calls.items():
        yield Figure(name, _host_us(call), "us")
    call = _busy(BUSY_S)
    blocked_s = [timing.seconds(call) for _ in range(5)]
    polled = [_polled(call) for _ in range(5)]
    each_us = statistics.median(taken_s / polls * 1e6 for taken_s, polls in polled)
    yield Figure("is_ready of a value to come", each_us, "us")
    ratio = timing.ratio([taken_s for taken_s, _ in polled], blocked_s)
    # On a CPU the polls take a core from the program.
    limit = None if jax.default_backend() == "cpu" else 1.05
    yield Figure("a program polled without pause over waited for", ratio, limit=limit)


def _host_us(call: Callable[[], Any]) -> float:
    jax.block_until_ready(call())
    began_s = time.perf_counter()
    results = [call() for _ in range(NUM_CALLS)]
    taken_s = time.perf_counter() - began_s
    jax.block_until_ready(results)
    return taken_s / NUM_CALLS * 1e6


def _busy(for_s: float) -> Callable[[], Any]:
    """Returns a call of a program that takes about so long."""
    x = jnp.eye(512)

    @jax.jit
    def run(x: Any, count: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(y @ x), x)

    run(x, 1).block_until_ready()
    few = 100
    count = round(few * for_s / timing.seconds(lambda: run(x, few)))
    return lambda: run(x, max(count, 1))


def _polled(call: Callable[[], Any]) -> tuple[float, int]:
    """Returns the seconds until a result was there, and how often it was asked."""
    began_s = time.perf_counter()
    result, polls = call(), 1
    while not result.is_ready():
        polls += 1
    return time.perf_counter() - began_s, polls
