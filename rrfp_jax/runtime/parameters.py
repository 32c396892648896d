"""The parameters of a pipeline: their structure, what is trained, where they lie."""

from collections.abc import Sequence
from typing import Any

import jax

from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import placing
from rrfp_jax.runtime.placing import RankMesh
from rrfp_jax.runtime.stage import Stage, Tree, flatten

Shardings = list[jax.sharding.Sharding]


class Parameters:
    """Describes one tree of parameters for each stage.

    Args:
      stages: say what is trained.
      params: a tree for each stage; only structure, shapes and dtypes matter.
      ranks: the devices of each stage.
      partition: a tree of `PartitionSpec` for each stage, or None for a replicated one.

    Attributes:
      layouts: of each stage's tree.
      trained: for each stage and array leaf, whether it is trained.
      shardings: for each stage and array leaf, where it lies.
      is_here: for each stage, whether this process has a part in it.
      processes: for each stage, those that have.

    Raises:
      ConfigError: the numbers of trees differ, `frozen` names no key, or the mesh does
        not divide a parameter.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        params: Sequence[Tree],
        ranks: Sequence[RankMesh],
        partition: Sequence[Tree] | None,
    ) -> None:
        for what, trees in (("parameter trees", params), ("partitions", partition)):
            if trees is not None and len(trees) != len(stages):
                raise ConfigError(
                    f"{len(trees)} {what} were given for {len(stages)} stages.\n"
                    "  Give one for each stage: {} or None for one that has none."
                )
        self.layouts = [flatten(tree)[1] for tree in params]
        self.trained = [
            stage.trained(tree) for stage, tree in zip(stages, params, strict=True)
        ]
        self.is_here = [rank.is_here for rank in ranks]
        self.processes = [rank.processes for rank in ranks]
        specs = partition or [None] * len(stages)
        self.shardings = [
            _shardings(*each) for each in zip(params, specs, ranks, strict=True)
        ]

    @property
    def trained_trees(self) -> list[Tree]:
        """Whether each parameter is trained, in the structure of the parameters."""
        return self._as_trees(self.trained)

    @property
    def sharding_trees(self) -> list[Tree]:
        """Where each parameter lies, in the structure of the parameters."""
        return self._as_trees(self.shardings)

    def place(self, params: Sequence[Tree]) -> list[Tree]:
        """Returns the parameters on the devices of their ranks; None elsewhere."""
        return [
            layout.unflatten(leaves) if is_here else None
            for layout, leaves, is_here in zip(
                self.layouts, self.leaves(params), self.is_here, strict=True
            )
        ]

    def leaves(self, params: Sequence[Tree]) -> list[list[Any]]:
        """Returns the array leaves of each stage, moved to where they belong.

        No leaves for the stages of other processes, whatever stands for them.

        Raises:
          ConfigError: they are not as declared.
        """
        if len(params) != len(self.layouts):
            raise ConfigError(
                f"{len(params)} parameter trees were given for {len(self.layouts)} "
                "stages.\n  Give one for each stage."
            )
        return [self._leaves(stage, tree) for stage, tree in enumerate(params)]

    def _leaves(self, stage: int, tree: Tree) -> list[Any]:
        if not self.is_here[stage]:
            return []
        leaves, layout = flatten(tree)
        if layout != self.layouts[stage]:
            raise ConfigError(
                f"the parameters of stage {stage} are not those that were declared: "
                f"{jax.tree.map(jax.numpy.shape, tree)}.\n"
                "  Keep their structure, shapes and dtypes."
            )
        for i, sharding in enumerate(self.shardings[stage]):
            if getattr(leaves[i], "sharding", None) != sharding:
                (leaves[i],) = placing.put([leaves[i]], [sharding])
        return leaves

    def _as_trees(self, leaves: Sequence[Sequence[Any]]) -> list[Tree]:
        pairs = zip(self.layouts, leaves, strict=True)
        return [layout.unflatten(mine) for layout, mine in pairs]


def _shardings(params: Tree, specs: Tree, rank: RankMesh) -> Shardings:
    if specs is None:
        return [rank.replicated for _ in flatten(params)[0]]
    matched = jax.tree.map(
        lambda leaf, spec: rank.of_parameter(spec, leaf.shape), params, specs
    )
    return jax.tree.leaves(matched)
