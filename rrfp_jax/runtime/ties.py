"""Parameters that live in several stages and are one: tied embeddings.

After the backward, the gradients of all copies are added up in the order in which the
group names them, and every copy gets the total, bitwise the same. Copies that start
equal and see equal updates stay equal. A norm over all stages counts the first only.

The copies may be in other processes. Each process then takes part only in what touches
its own, and all of them in the same order.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime.parameters import Parameters
from rrfp_jax.transport.base import Expected, Tied, Transport

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
        self._is_here = parameters.is_here
        self._processes = parameters.processes
        self._shardings = parameters.sharding_trees
        self._trained = trained = parameters.trained_trees
        self._shapes: list[tuple[int, ...]] = []
        self._dtypes: list[Any] = []
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
            self._dtypes.append(find(params, group[0]).dtype)
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
            if not self._is_here[group[0][0]]:
                programs.append(jnp.add)  # never called
                continue
            where = find(self._shardings, group[0])
            aval = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where)
            add = jax.jit(jnp.add, out_shardings=where)
            programs.append(add.lower(aval, aval).compile())
        return programs

    def expected(self, name: Tied) -> Expected:
        """Returns what a message brings; see `transport.base`."""
        group = self._groups[name.group]
        source, to = group[name.source], group[name.to]
        dtype = jnp.float32 if name.is_gradient else self._dtypes[name.group]
        return Expected(
            [jax.ShapeDtypeStruct(self._shapes[name.group], dtype)],
            [find(self._shardings, source)],
            [find(self._shardings, to)],
            self._processes[source[0]],
            self._processes[to[0]],
        )

    def add_up(self, grads: list[Any], mover: "Mover") -> None:
        """Gives every copy the total gradient of its group, in place."""
        for number, (group, add) in enumerate(
            zip(self._groups, self._programs, strict=True)
        ):
            if find(self._trained, group[0]):  # all of them, or none
                total = self._total(number, group, add, grads, mover)
                self._spread(number, True, total, grads, mover)

    def copy(self, params: list[Any], mover: "Mover") -> None:
        """Gives every copy the value of its owner, in place."""
        for number, group in enumerate(self._groups):
            value = find(params, group[0]) if self._is_here[group[0][0]] else None
            self._spread(number, False, value, params, mover)

    def _total(
        self,
        number: int,
        group: Sequence[Place],
        add: Callable[..., Any],
        grads: Sequence[Any],
        mover: "Mover",
    ) -> Any:
        """Returns the sum over a group, where its owner is; None elsewhere."""
        owner, *copies = group
        where = find(self._shardings, owner)
        names = [Tied(True, number, i, 0) for i in range(1, len(group))]
        for name, copy in zip(names, copies, strict=True):
            if self._is_here[copy[0]]:
                mover.send(name, find(grads, copy), where)
        if not self._is_here[owner[0]]:
            return None
        total = find(grads, owner)
        for name in names:
            total = add(total, mover.take(name))
        return total

    def _spread(
        self,
        number: int,
        is_gradient: bool,
        value: Any,
        trees: list[Any],
        mover: "Mover",
    ) -> None:
        """Gives the value of the owner to all of a group, in place."""
        group = self._groups[number]
        names = [Tied(is_gradient, number, 0, i) for i in range(1, len(group))]
        if self._is_here[group[0][0]]:
            replace(trees, group[0], value)
            for name, copy in zip(names, group[1:], strict=True):
                mover.send(name, value, find(self._shardings, copy))
        for name, copy in zip(names, group[1:], strict=True):
            if self._is_here[copy[0]]:
                replace(trees, copy, mover.take(name))


@dataclasses.dataclass(frozen=True)
class Mover:
    """Moves single arrays between stages.

    Attributes:
      transport: of the pipeline.
      until: reads mail until something is true; None where there is no other process.
    """

    transport: Transport
    until: Callable[[Callable[[], bool]], None] | None = None

    def send(self, name: Tied, array: Any, where: Any) -> None:
        """Starts to move an array; what arrives is a copy in any case.

        A copy in the same place would be the same buffer, and each is to be donated.
        """
        if where.device_set == array.sharding.device_set:
            array = jnp.copy(array)
        if self.until is not None:
            array.block_until_ready()  # so that no other process has to wait for us
        self.transport.send(name, [array], [where])
        self.transport.arrived()

    def take(self, name: Tied) -> Any:
        """Returns an array that was sent; waits for it if it comes from elsewhere."""
        if self.until is not None:
            self.until(functools.partial(self._is_here, name))
        (array,) = self.transport.take(name)
        return array

    def _is_here(self, name: Tied) -> bool:
        self.transport.arrived()  # lets it come in, and lets go what waits to be sent
        return self.transport.has(name)


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


def replace(trees: list[Any], place: Place, value: Any) -> None:
    """Puts a value in a place; containers on the way to it are copied."""
    stage, *path = place
    trees[stage] = _replaced(trees[stage], tuple(path), value)


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
