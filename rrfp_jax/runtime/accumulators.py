"""The float32 buffers in which gradients add up: one for each trained parameter.

They are made anew at the start of a step, donated from one backward to the next, and
are the gradients at its end.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.runtime.parameters import Parameters


class Accumulators:
    """Makes the accumulators of a pipeline.

    Args:
      parameters: what they are for.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters

    def compile(self) -> None:
        """Compiles the programs that make them, if they are not."""
        _ = self._programs

    def zeros(self) -> list[list[jax.Array]]:
        """Returns fresh accumulators by stage, on the devices of its parameters.

        None for the stages of other processes.
        """
        return [make() for make in self._programs]

    def as_trees(self, arrays: Sequence[Sequence[jax.Array]]) -> list[Any]:
        """Puts accumulators into the trees of their parameters, None for no one.

        Args:
          arrays: by stage; empty for a step without backward.
        """
        trees = []
        for stage, mine in enumerate(arrays):
            rest = iter(mine)
            trained = self._parameters.trained[stage]
            leaves = [next(rest, None) if trains else None for trains in trained]
            trees.append(self._parameters.layouts[stage].unflatten(leaves))
        return trees

    @functools.cached_property
    def _programs(self) -> list[Callable[[], list[jax.Array]]]:
        programs: list[Callable[[], list[jax.Array]]] = []
        for stage, trained in enumerate(self._parameters.trained):
            if not self._parameters.is_here[stage]:
                programs.append(list)
                continue
            chosen = [i for i, is_trained in enumerate(trained) if is_trained]
            shapes = [self._parameters.layouts[stage].avals[i].shape for i in chosen]
            make = functools.partial(_zeros, shapes)
            where = [self._parameters.shardings[stage][i] for i in chosen]
            programs.append(jax.jit(make, out_shardings=where).lower().compile())
        return programs


def _zeros(shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    return [jnp.zeros(shape, jnp.float32) for shape in shapes]
