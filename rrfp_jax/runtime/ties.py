"""Parameters that live in several stages and are one: tied embeddings.

After the backward, the gradients of all copies are added up in the order in which the
group names them, and every copy gets the total, bitwise the same. Copies that start
equal and see equal updates stay equal. A norm over all stages counts the first only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime.parameters import Parameters

Place = tuple[Any, ...]  # stage, then the keys that lead to the leaf in its params
Group = Sequence[Place]


class Ties:
    """The groups of tied parameters of a pipeline.

    Args:
      groups: the places of each tied parameter; the first is the owner.
      params: by stage; shapes matter only.
      parameters: what is trained, and where it lies.

    Raises:
      ConfigError: a place does not exist or is named twice, or the places of a group
        differ in shape or in whether they are trained.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        params: Sequence[Any],
        parameters: Parameters,
    ) -> None:
        self._groups = [tuple(group) for group in groups]
        self._shardings = parameters.sharding_trees
        trained = parameters.trained_trees
        self._shapes = []
        places = [place for group in self._groups for place in group]
        for group in self._groups:
            shapes = {place: find(params, place).shape for place in group}
            is_trained = {place: find(trained, place) for place in group}
            for found in (shapes, is_trained):
                if len(set(found.values())) != 1:
                    raise ConfigError(
                        f"tied parameters are unlike (shapes {shapes}, trained "
                        f"{is_trained}).\n  Tie parameters of one shape, and freeze "
                        "all of them or none."
                    )
            self._shapes.append(shapes[group[0]])
        for place in places:
            if places.count(place) > 1:
                raise ConfigError(f"{place} is tied twice.\n  Name each place once.")

    def compile(self) -> None:
        """Compiles the additions, if they are not."""
        _ = self._programs

    @functools.cached_property
    def _programs(self) -> list[Callable[..., Any]]:
        programs: list[Callable[..., Any]] = []
        for group, shape in zip(self._groups, self._shapes, strict=True):
            where = find(self._shardings, group[0])
            aval = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
            add = jax.jit(jnp.add, out_shardings=where)
            programs.append(add.lower(aval, aval).compile())
        return programs

    def add_up(self, grads: list[Any]) -> None:
        """Gives every copy the total gradient of its group, in place."""
        for group, add in zip(self._groups, self._programs, strict=True):
            first, *others = (find(grads, place) for place in group)
            if first is None:  # frozen, all of them
                continue
            total = first
            for other in others:
                total = add(total, jax.device_put(other, first.sharding))
            for place in group:
                moved = jax.device_put(total, find(self._shardings, place))
                grads[place[0]] = _replaced(grads[place[0]], place[1:], moved)


def find(trees: Sequence[Any], place: Place) -> Any:
    """Returns what is at a place, or at the beginning of one.

    Raises:
      ConfigError: nothing is.
    """
    node: Any = trees
    try:
        for key in place:
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
