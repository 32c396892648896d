"""Times the layers of a model on this machine, so that stages can be made even.

Each layer is compiled as a stage of its own: the very F and B that a pipeline of such
stages would run, recomputing what the config says. Layers that compute the same (all
blocks of a tower) are compiled and timed once.
"""

import dataclasses
import functools
import re
import statistics
import time
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np

from rrfp_jax.models.layer import Layer, Model
from rrfp_jax.observe.progress import progress
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.runtime.programs import compile_stage
from rrfp_jax.runtime.stage import Stage, flatten, is_inexact
from rrfp_jax.runtime.tracing import Signature, trace_stage
from rrfp_jax.train import feeds
from rrfp_jax.train.config import ModelConfig, PipelineConfig
from rrfp_jax.train.stages import cut_model

# Is told what it times ("language/head B") and a call of it; returns its seconds.
Timer = Callable[[str, Callable[[], Any]], float]

_WARM_UPS = 2
_REPEATS = 9


def median_seconds(
    what: str, run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Returns the median seconds of calls after some that warm up.

    Args:
      what: is not used; it makes this a `Timer`.
      run: starts the work and returns arrays, which are waited for.
      clock: tells seconds.
    """
    del what
    seconds = []
    for _ in range(_WARM_UPS + _REPEATS):
        began_s = clock()
        jax.block_until_ready(run())
        seconds.append(clock() - began_s)
    return statistics.median(seconds[_WARM_UPS:])


def layer_seconds(
    model: Model,
    config: ModelConfig,
    example: feeds.Arrays,
    timer: Timer = median_seconds,
) -> dict[str, float]:
    """Returns the seconds of each layer on one microbatch, by its name.

    Forward and, where anything is trained there or upstream, backward, on the first
    device. A layer that the microbatch does not visit takes none.

    Args:
      model: whose layers.
      config: what is frozen, what is recomputed.
      example: shapes of the microbatch, see `feeds.example`.
      timer: how to measure.
    """
    layers = _alone(model, config, example)
    alike: dict[Hashable, list[_Alone]] = {}
    for layer in layers:
        alike.setdefault(layer.mathematics(), []).append(layer)
    seconds = dict.fromkeys((layer.name for layer in model.layers), 0.0)
    with progress(len(alike), "measure", "layer") as bar:
        for same in alike.values():
            taken_s = same[0].seconds(timer)
            seconds.update((layer.name, taken_s) for layer in same)
            bar.advance({same[0].name: f"{taken_s * 1e3:.3g} ms"})
    return seconds


@dataclasses.dataclass(frozen=True)
class _Alone:
    """A layer as a stage of its own.

    Attributes:
      layer: it.
      stage: with no other layer.
      signature: of the stage.
      trained: for each array leaf of its parameters, whether it is trained.
    """

    layer: Layer
    stage: Stage
    signature: Signature
    trained: tuple[bool, ...]

    @property
    def name(self) -> str:
        """The layer's."""
        return self.layer.name

    def mathematics(self) -> Hashable:
        """Returns what two layers have in common if their programs are the same.

        Scalar constants may differ: a layer folds its own index into its dropout key.
        """
        signature = self.signature
        run = functools.partial(signature.call, self.stage)
        traced = jax.make_jaxpr(lambda *arrays: run(arrays))(*signature.avals)
        return (
            _SCALAR.sub("_", str(traced)),
            self.trained,
            signature.wants_cotangent,
            signature.num_targets,
            signature.has_backward,
            signature.is_loss,
        )

    def seconds(self, timer: Timer) -> float:
        """Compiles the layer for the first device and times it."""
        rank = placing.make_ranks(1)[0]
        traced = trace_stage(self.stage, self.signature, self.trained)
        where = [rank.replicated] * len(self.trained)
        programs = compile_stage(traced, self.signature, rank, where)
        _, rest = _arrays(programs.forward)
        init = jax.jit(self.layer.init, out_shardings=rank.replicated)
        params = jax.tree.leaves(init(jax.random.key(0)))

        def forward() -> Any:
            return programs.forward(params, rest)

        taken_s = timer(f"{self.name} F", forward)
        run_backward = programs.backward
        if run_backward is None:
            return taken_s
        outputs, kept, _ = forward()
        saved = programs.saved.of([*rest, *outputs, *kept])
        accumulators, _, _, cotangents = _arrays(programs.backward)

        def backward() -> Any:
            nonlocal accumulators  # donated
            results = run_backward(accumulators, params, saved, cotangents)
            accumulators = results[0]
            return results

        return taken_s + timer(f"{self.name} B", backward)


# In the text of a jaxpr, such as `3:u32[]`.
_SCALAR = re.compile(r"(?<![\w.])-?\d[\w.+-]*(?=:\w+\[\])")


def _alone(model: Model, config: ModelConfig, example: feeds.Arrays) -> list[_Alone]:
    """Returns the layers that the microbatch visits, as stages with their inputs."""
    count = len(model.layers)
    each = PipelineConfig(count, num_microbatches=1, layer_counts=(1,) * count)
    cut = cut_model(model, config, each, {})
    stages = cut.stages(config.recompute)
    pipeline = Pipeline(
        stages,
        cut.by_stage(jax.eval_shape(lambda: model.init(jax.random.key(0)))),
        edges=cut.edges,
        placement=cut.placement,
        ranks=placing.make_ranks(1) * count,
    )
    graph = pipeline.graph([() if "images_NHWC" in example else cut.without_images()])
    feed = [flatten(stage.select(example))[1] for stage in stages]
    return [
        _Alone(
            cut.layers[s][0],
            stages[s],
            signature,
            tuple(pipeline.parameters.trained[s]),
        )
        for s, signature in pipeline.compiler.missing(graph, [feed])
    ]


def _arrays(program: Any) -> Any:
    """Returns arguments for a program: noise, and zeros where they may be indices."""
    device = placing.make_ranks(1)[0].device
    rng = np.random.default_rng(0)

    def array(info: Any) -> Any:
        if not is_inexact(info):
            return jax.device_put(np.zeros(info.shape, info.dtype), device)
        noise = rng.random(info.shape, np.float32)
        return jax.device_put(noise.astype(info.dtype), device)

    arguments, _ = program.args_info
    return jax.tree.map(array, arguments)
