"""The yardstick of the host time: a runtime's own calls, in an order known beforehand.

For chains of one stage a rank. Executables and `device_put`s are those of the runtime;
nothing is decided, nothing is polled, and there is one wait, at the end.
"""

from typing import Any

import jax
import numpy as np

from rrfp_jax import Pipeline


class PlainLoop:
    """Calls a pipeline's own executables, microbatch after microbatch.

    Args:
      pipeline: a chain; its policy says whether the backward is split.
      params: by stage, on the devices of their ranks.
      microbatches: of the step.
      scale: of the loss.
    """

    def __init__(
        self, pipeline: Pipeline, params: Any, microbatches: Any, scale: float = 1.0
    ) -> None:
        graph, self._feeds = pipeline._prepare(microbatches, backward=True)
        layouts = [[feed[1] for feed in each] for each in self._feeds]
        self._plans = pipeline.compiler.plans(graph, layouts)
        self._at = [pipeline.ranks[rank].replicated for rank in graph.placement]
        self._scale = jax.device_put(np.float32(scale), self._at[-1])
        self._params = [jax.tree.leaves(p) for p in params]
        self._zeros = pipeline._accumulators.zeros

    def __call__(self) -> None:
        """Runs a step and waits for its gradients."""
        accumulators = self._zeros()
        for feeds, plan in zip(self._feeds, self._plans, strict=True):
            saved = self._forward(feeds, plan)
            self._backward(plan, saved, accumulators)
        jax.block_until_ready(accumulators)

    def _forward(self, feeds: Any, plan: Any) -> list[Any]:
        """Returns what the forward of each stage keeps."""
        saved, payload = [], []
        for s, programs in enumerate(plan):
            rest = jax.device_put(payload, self._at[s]) if payload else []
            if feeds[s][0]:
                rest = [*rest, *jax.device_put(feeds[s][0], self._at[s])]
            payload, kept, _ = programs.forward(self._params[s], rest)
            saved.append(programs.saved.of([*rest, *payload, *kept]))
        return saved

    def _backward(self, plan: Any, saved: list[Any], accumulators: list[Any]) -> None:
        """Adds the gradients of a microbatch to the accumulators, in place."""
        cotangents = [self._scale]
        for s in reversed(range(len(plan))):
            programs, params, mine = plan[s], self._params[s], saved[s]
            if programs.weight is None:
                accumulators[s], onward, _ = programs.backward(
                    accumulators[s], params, mine, [cotangents]
                )
            else:
                onward, crossing, _ = programs.backward(params, mine, [cotangents])
                kept = programs.kept.of([*mine, *cotangents, *crossing])
                accumulators[s], _ = programs.weight(accumulators[s], params, kept)
            if s:
                cotangents = jax.device_put(onward[0], self._at[s - 1])
