"""Toy pipelines of every topology, and the one process that they are compared with.

Every stage is `tanh(sum of inputs @ w + b)` of width 4; the last one adds the squared
error. `reference` runs the same functions over the whole batch under
`jax.value_and_grad`, and knows nothing of the package under test but `Stage`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rrfp_jax import Pipeline, Stage, split

Tree = Any
WIDTH = 4
ROWS = 2  # of a microbatch


def hidden(params: Tree, inputs: Tree, feed: Tree) -> jax.Array:
    """An inner stage; one without in-edge reads the feed."""
    x = feed["x"] if inputs is None else inputs
    x = functools.reduce(jnp.add, x) if isinstance(x, tuple) else x
    return jnp.tanh(x @ params["w"] + params["b"])


def loss(params: Tree, inputs: Tree, feed: Tree) -> jax.Array:
    """The last stage: 0.5 x the sum of squared errors."""
    return 0.5 * jnp.sum((hidden(params, inputs, feed) - feed["t"]) ** 2)


@dataclasses.dataclass(frozen=True)
class Toy:
    """A topology and where its stages lie."""

    edges: tuple[tuple[int, int], ...]
    placement: tuple[int, ...]

    @property
    def stages(self) -> list[Callable[..., Any]]:
        return [hidden] * (len(self.placement) - 1) + [loss]

    def params(self, seed: int = 0) -> list[Tree]:
        draw = np.random.default_rng(seed)
        return [
            {
                "w": draw.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 2,
                "b": draw.normal(size=WIDTH).astype(np.float32) / 2,
            }
            for _ in self.placement
        ]

    def pipeline(self, **kwargs: Any) -> Pipeline:
        return Pipeline(
            self.stages,
            self.params(),
            edges=self.edges,
            placement=self.placement,
            **kwargs,
        )


def chain_of(placement: Sequence[int]) -> Toy:
    """A plain chain."""
    edges = tuple((s, s + 1) for s in range(len(placement) - 1))
    return Toy(edges, tuple(placement))


TOWERS = ((0, 1), (1, 3), (2, 3), (3, 4))
TOYS = {
    "single_stage": chain_of([0]),
    "one_each": chain_of([0, 1, 2, 3]),
    "three": chain_of([0, 1, 2]),
    "two_stages_a_rank": chain_of([0, 0, 1, 1]),
    "interleaved": chain_of([0, 1, 0, 1]),
    "v_shaped": chain_of([0, 1, 1, 0]),
    "two_towers_that_join": Toy(TOWERS, (0, 1, 2, 3, 4)),
    "tower_on_ranks_of_another": Toy(TOWERS, (0, 1, 0, 1, 2)),
    "skip_edges": Toy(((0, 1), (1, 2), (2, 3), (0, 3), (0, 2)), (0, 1, 2, 3)),
}


@functools.cache
def compiled(name: str) -> Pipeline:
    """One pipeline a topology for all tests; each assigns the policy it is about."""
    return TOYS[name].pipeline()


def batch_of(rows: int, seed: int = 1) -> Tree:
    """A batch for every toy."""
    draw = np.random.default_rng(seed)
    return {
        "x": draw.normal(size=(rows, WIDTH)).astype(np.float32),
        "t": draw.normal(size=(rows, WIDTH)).astype(np.float32),
    }


def microbatches_of(count: int, seed: int = 1) -> list[Tree]:
    """So many microbatches of `ROWS` rows."""
    return split(batch_of(count * ROWS, seed), count)


def run_stages(
    stages: Sequence[Any],
    edges: Sequence[tuple[int, int]],
    params: Sequence[Tree],
    feed: Tree,
    skipped: Sequence[int] = (),
) -> Tree:
    """Runs the DAG of stages in one process and returns what the last one returns."""
    out: list[Tree] = []
    for s, stage in enumerate(stages):
        here = [None if u in skipped else out[u] for u, v in edges if v == s]
        inputs = tuple(here) if len(here) > 1 else (here[0] if here else None)
        fn = stage.fn if isinstance(stage, Stage) else stage
        out.append(None if s in skipped else fn(params[s], inputs, feed))
    return out[-1]


def reference(
    toy: Toy, params: Sequence[Tree], batch: Tree, scale: float = 1.0
) -> tuple[jax.Array, list[Tree]]:
    """Returns loss and gradients of the whole batch in one process."""

    def total(params: Sequence[Tree]) -> jax.Array:
        return scale * run_stages(toy.stages, toy.edges, params, batch)

    return jax.value_and_grad(total)(list(params))


@functools.cache
def expected(name: str, count: int, scale: float = 1.0) -> tuple[jax.Array, list[Tree]]:
    """The reference of a toy's own parameters on `microbatches_of(count)`."""
    toy = TOYS[name]
    return reference(toy, toy.params(), batch_of(count * ROWS), scale)


def assert_close(found: Tree, expected: Tree, relative: float = 1e-5) -> None:
    """Asserts equal structures and, leaf by leaf, equal values up to the tolerance.

    Relative to the largest entry of the leaf: what is compared is a sum in another
    order, whose error does not shrink with an entry that happens to cancel out.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(found),
        jax.tree.leaves(expected),
        strict=True,
    ):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        largest = np.max(np.abs(b), initial=0.0)
        error = np.max(np.abs(a - b), initial=0.0)
        assert error <= relative * largest, (jax.tree_util.keystr(path), a, b)


def assert_same_bits(found: Tree, expected: Tree) -> None:
    """Asserts that two trees are equal bit by bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def sgd(params: Sequence[Tree], grads: Sequence[Tree], rate: float) -> list[Tree]:
    """One step of gradient descent, on the host."""
    return [
        jax.tree.map(lambda p, g: np.asarray(p) - np.float32(rate) * np.asarray(g), *pg)
        for pg in zip(params, grads, strict=True)
    ]
