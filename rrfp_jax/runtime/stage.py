"""A pipeline stage as its author writes it, and how its values split into leaves."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from rrfp_jax.errors import ConfigError

Tree = Any
StageFunction = Callable[[Tree, Tree, Tree], Tree]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage: a pure function and what of it can be trained.

    Attributes:
      fn: `fn(params, inputs, feed) -> output`. `inputs` is None for a stage without
        in-edge, the output of its source for one, and a tuple in the order of the edges
        for several; a source that the microbatch skips counts as None. The last stage
        returns the loss of the microbatch, a scalar *sum*, or a pair (loss, auxiliary
        outputs).
      frozen: True, or the top-level keys of `params` that are not trained.
      select: picks from a microbatch what this stage reads, its `feed`; by default all
        of it. What is picked is copied to the stage's devices at each forward.
    """

    fn: StageFunction
    frozen: bool | Collection[str] = False
    select: Callable[[Tree], Tree] = lambda microbatch: microbatch

    def trained(self, params: Tree) -> list[bool]:
        """Returns, for each array leaf of `params`, whether it is trained.

        Integer leaves never are.

        Raises:
          ConfigError: `frozen` names a key that `params` does not have.
        """
        leaves = [
            (path, leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if is_array(leaf)
        ]
        if isinstance(self.frozen, bool):
            return [not self.frozen and is_inexact(leaf) for _, leaf in leaves]
        if isinstance(self.frozen, str):
            raise ConfigError(
                f"frozen={self.frozen!r} is one string.\n  Give a collection of keys."
            )
        unknown = sorted(set(self.frozen) - {_key(path) for path, _ in leaves})
        if unknown:
            raise ConfigError(
                f"frozen keys {unknown} are not among the stage's parameters "
                f"{sorted({str(_key(path)) for path, _ in leaves})}.\n"
                "  Name top-level keys of its params."
            )
        return [
            _key(path) not in self.frozen and is_inexact(leaf) for path, leaf in leaves
        ]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The structure of a value that crosses a program's border.

    Array leaves travel. Whatever else a tree holds (None, integers, strings) is the
    same for every microbatch of a bucket, and is kept here.

    Attributes:
      treedef: of the whole value.
      statics: (leaf position, value, its repr) of the leaves that are no arrays; the
        repr keeps 1, 1.0 and True apart.
      avals: shapes and dtypes of the array leaves, in order.
    """

    treedef: jax.tree_util.PyTreeDef
    statics: tuple[tuple[int, Any, str], ...]
    avals: tuple[jax.ShapeDtypeStruct, ...]

    def unflatten(self, arrays: Sequence[Any]) -> Tree:
        """Puts array leaves back into the tree."""
        rest = iter(arrays)
        statics = {i: value for i, value, _ in self.statics}
        count = self.treedef.num_leaves
        leaves = [statics[i] if i in statics else next(rest) for i in range(count)]
        return jax.tree.unflatten(self.treedef, leaves)


def _key(path: tuple[Any, ...]) -> Any:
    """Returns the top-level key of a leaf; None where there is none."""
    return getattr(path[0], "key", None) if path else None


def is_array(leaf: Any) -> bool:
    """Whether a leaf travels: anything with a shape and a dtype."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def flatten(tree: Tree) -> tuple[list[Any], Layout]:
    """Returns the array leaves of a tree and its layout."""
    leaves, treedef = jax.tree.flatten(tree)
    statics = tuple((i, x, repr(x)) for i, x in enumerate(leaves) if not is_array(x))
    arrays = [x for x in leaves if is_array(x)]
    return arrays, Layout(treedef, statics, tuple(map(_aval, arrays)))


def _aval(array: Any) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype as JAX will have them: float64 of numpy is float32."""
    dtype = array.dtype
    if isinstance(array, np.ndarray | np.generic):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return jax.ShapeDtypeStruct(array.shape, dtype)


def is_inexact(aval: Any) -> bool:
    """Whether a leaf has a cotangent."""
    return bool(jax.numpy.issubdtype(aval.dtype, jax.numpy.inexact))
