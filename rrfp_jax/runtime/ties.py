"""Parameters that live in several stages and are one: tied embeddings.

After the backward, the gradients of all copies are added up in the order in which the
group names them, and every copy gets the total, bitwise the same. Copies that start
equal and see equal updates stay equal. A norm over all stages counts the first only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from rrfp_jax.errors import ConfigError

Place = tuple[Any, ...]  # stage, then the keys that lead to the leaf in its params
Group = Sequence[Place]


class Ties:
    """The groups of tied parameters of a pipeline.

    Raises:
      ConfigError: a place does not exist, or the shapes of a group differ.
    """

    def __init__(self, groups: Sequence[Group], params: Sequence[Any]) -> None:
        self.groups = [tuple(group) for group in groups]
        for group in self.groups:
            shapes = {place: _get(params, place).shape for place in group}
            if len(set(shapes.values())) != 1:
                raise ConfigError(
                    f"tied parameters have different shapes: {shapes}.\n"
                    "  Tie parameters of one shape."
                )

    def add_up(self, grads: list[Any]) -> None:
        """Gives every copy the total gradient of its group, in place."""
        for group in self.groups:
            first, *others = (_get(grads, place) for place in group)
            total = first
            for other in others:
                total = _add(total, jax.device_put(other, first.sharding))
            for place, copy in zip(group, (first, *others), strict=True):
                moved = jax.device_put(total, copy.sharding)
                grads[place[0]] = _replaced(grads[place[0]], place[1:], moved)


@jax.jit
def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    return a + b


def _get(trees: Sequence[Any], place: Place) -> Any:
    stage, *path = place
    node = trees[stage]
    try:
        for key in path:
            node = node[key]
    except (KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"tied parameter {place} does not exist.\n"
            "  Name a place as (stage, key, key, ...)."
        ) from error
    return node


def _replaced(tree: Any, path: Place, value: Any) -> Any:
    """Returns `tree` with the leaf at `path` replaced; containers are copied."""
    if not path:
        return value
    key, *rest = path
    inner = _replaced(tree[key], tuple(rest), value)
    if isinstance(tree, dict):
        return {**tree, key: inner}
    rebuild: Callable[[Any], Any] = type(tree)
    return rebuild([inner if i == key else each for i, each in enumerate(tree)])
