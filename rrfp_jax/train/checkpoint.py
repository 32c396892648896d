"""Checkpoints: parameters and optimizer states by layer, step, position in the data.

A checkpoint is complete or absent (orbax renames it into place). It holds global layer
names and knows nothing of stages.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from rrfp_jax.train.optimizer import Trees


@dataclasses.dataclass
class State:
    """What a run carries from step to step.

    Attributes:
      step: steps done.
      updates: steps of them that were finite, and so moved the optimizer's schedule.
      params: by stage and layer, on the devices of the stage's rank.
      optimizer: states of the trained layers, likewise.
      data: where the next batch is.
    """

    step: int
    updates: int
    params: Trees
    optimizer: Trees
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of a work directory."""

    def __init__(self, workdir: pathlib.Path, keep: int) -> None:
        self._manager = ocp.CheckpointManager(
            (workdir / "checkpoints").absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=keep, create=True),
        )

    @property
    def latest(self) -> int | None:
        """The step of the newest complete checkpoint."""
        step: int | None = self._manager.latest_step()
        return step

    def save(self, state: State) -> None:
        """Copies the state to the host and writes it in the background."""
        if self.latest == state.step:
            return
        self._manager.save(
            state.step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(_arrays(state)),
                meta=ocp.args.JsonSave(
                    {"step": state.step, "updates": state.updates, "data": state.data}
                ),
            ),
        )

    def restore(self, state: State) -> State:
        """Returns the newest checkpoint, laid out as `state` is."""
        wanted = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            _arrays(state),
        )
        found = self._manager.restore(
            self.latest,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardRestore(wanted), meta=ocp.args.JsonRestore()
            ),
        )
        return State(
            step=found.meta["step"],
            updates=found.meta["updates"],
            params=_by_stage(found.arrays["params"], state.params),
            optimizer=_by_stage(found.arrays["optimizer"], state.optimizer),
            data=found.meta["data"],
        )

    def close(self) -> None:
        """Waits until what was saved is whole."""
        self._manager.wait_until_finished()
        self._manager.close()


def _arrays(state: State) -> dict[str, dict[str, Any]]:
    """The arrays of a state by layer name, all stages together."""
    return {"params": _merged(state.params), "optimizer": _merged(state.optimizer)}


def _merged(trees: Trees) -> dict[str, Any]:
    return {name: layer for tree in trees for name, layer in tree.items()}


def _by_stage(layers: dict[str, Any], like: Trees) -> Trees:
    return [{name: layers[name] for name in tree} for tree in like]
