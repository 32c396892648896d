"""BF, BFW and fixed 1F1B of one language model, on four ranks that share the device.

One device runs the ranks' programs one after another, so no order can be faster than
another but by its own overhead. What is seen here is that all give the same gradients,
and what each takes beyond a plain loop of the same executables.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from rrfp_jax import Policy
from rrfp_jax.models.model import build
from rrfp_jax.train.config import ModelConfig
from scripts.bench import plain_loop
from scripts.gpu import gradients, shared_device, timing
from scripts.gpu.figures import Figure
from scripts.gpu.sizes import Size

IN_FLIGHT = 8  # as deep as residuals of a wide model allow
POLICIES = {
    "BF": Policy("bf", in_flight_limit=IN_FLIGHT),
    "BFW": Policy("bfw", in_flight_limit=IN_FLIGHT),
    "1F1B": Policy("1f1b", "fixed"),
}
# Between orders of the same programs only float32 sums differ. BFW's programs are
# others: they round where their own fusions end.
SAME_LIMIT, SPLIT_LIMITS = 1e-5, {"float32": 1e-5, "bfloat16": 2.0**-7}


def check(size: Size) -> Iterator[Figure | str]:
    """Yields the figures, and what is done before each."""
    yield "compile"
    run = _Runs(size)
    grads = {name: run.grads(name) for name in POLICIES}
    limits = {"BFW": SPLIT_LIMITS[size.orders.language.compute_dtype]}
    for name in ("BFW", "1F1B"):
        error = gradients.distance(grads[name], grads["BF"])
        limit = limits.get(name, SAME_LIMIT)
        yield Figure(f"gradients of {name} against BF", error, limit=limit)
    del grads
    yield "time"
    yield from run.times(size)
    used = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if used is not None:
        yield Figure("peak of device memory", used / 2**30, "GiB")


class _Runs:
    """The model as a pipeline, compiled with the backward whole and split."""

    def __init__(self, size: Size) -> None:
        text = size.orders
        draw = np.random.default_rng(0)
        self._microbatches = [
            shared_device.text_microbatch(draw, text)
            for _ in range(text.num_microbatches)
        ]
        self._scale = shared_device.scale_of(self._microbatches)
        model = build(text.language, None)
        params = shared_device.initialise(model)
        config = ModelConfig(text.language)
        self._piped = shared_device.piped(model, config, params, text)
        self._loops = {name: self._loop(name) for name in ("BF", "BFW")}

    def grads(self, name: str) -> Any:
        """Returns the gradients of a step, by stage."""
        pipeline = self._piped.pipeline
        pipeline.policy = POLICIES[name]
        return pipeline.run(self._piped.params, self._microbatches, self._scale).grads

    def times(self, size: Size) -> Iterator[Figure]:
        """Yields what a step takes, beside the plain loop of the same programs."""
        found: dict[str, list[float]] = {name: [] for name in POLICIES}
        alone: dict[str, list[float]] = {name: [] for name in self._loops}
        for loop in self._loops.values():
            loop()
        for _ in range(size.repeats):
            for name, loop in self._loops.items():
                alone[name].append(timing.seconds(loop))
            for name, taken_s in found.items():
                taken_s.append(timing.seconds(lambda name=name: self.grads(name)))
        for name, taken_s in found.items():
            loop_s = alone["BFW" if name == "BFW" else "BF"]
            yield Figure(f"{name}: a step", statistics.median(taken_s) * 1e3, "ms")
            over = timing.ratio(taken_s, loop_s)
            yield Figure(f"{name}: over its plain loop", over, limit=size.order_limit)
            more_s = statistics.median(taken_s) - statistics.median(loop_s)
            num_launches = self._num_launches(name)
            each_us = more_s / num_launches * 1e6
            yield Figure(f"{name}: more than the loop, a launch", each_us, "us")

    def _loop(self, name: str) -> plain_loop.PlainLoop:
        self._piped.pipeline.policy = POLICIES[name]
        return plain_loop.PlainLoop(
            self._piped.pipeline,
            self._piped.params,
            self._microbatches,
            self._scale,
        )

    def _num_launches(self, name: str) -> int:
        kinds = 3 if POLICIES[name].is_split else 2
        return kinds * shared_device.NUM_RANKS * len(self._microbatches)
