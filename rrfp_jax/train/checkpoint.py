"""Checkpoints: parameters and optimizer states by layer, step, position in the data.

A checkpoint is a folder `checkpoints/STEP`, complete or absent: it is written under
another name, and renamed when all of it is there. Inside, `meta.json` says which of the
folders `part_K` has which layer. A part is what one group of processes holds, and all
of them write it, each its own shards (by orbax); so nothing that is read depends on how
layers and processes were laid out: each process reads the layers it needs.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from orbax.checkpoint.options import MultiprocessingOptions

from rrfp_jax.coordination.desk import Share, with_nobody
from rrfp_jax.errors import ConfigError
from rrfp_jax.train.optimizer import Trees

_META = "meta.json"
_WHOLE = jax.sharding.PartitionSpec()
_INCOMPLETE = ".incomplete"


@dataclasses.dataclass
class State:
    """What a run carries from step to step.

    Attributes:
      step: steps done.
      updates: steps of them that were finite, and so moved the optimizer's schedule.
      params: by stage and layer, on the devices of the stage's rank; nothing for the
        stages of other processes.
      optimizer: states of the trained layers, likewise.
      data: where the next batch is.
    """

    step: int
    updates: int
    params: Trees
    optimizer: Trees
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of a work directory.

    Saving goes on in the background; `poll` brings it to its end. All processes make
    the same calls in the same order.

    Args:
      workdir: its folder; one that all processes see.
      keep: how many complete checkpoints to keep.
      layers: by stage, the names of its layers.
      groups: by stage, the processes that hold it, ascending.
      process: this one.
      share: the exchange with all other processes.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        keep: int,
        layers: Sequence[Sequence[str]],
        groups: Sequence[tuple[int, ...]],
        process: int = 0,
        share: Share = with_nobody,
    ) -> None:
        self._folder = (workdir / "checkpoints").absolute()
        self._keep = keep
        self._layers = layers
        self._process = process
        self._share = share
        self._groups = groups
        self._parts = sorted(set(groups))
        self._savers = {
            number: _saver(number, group)
            for number, group in enumerate(self._parts)
            if process in group
        }
        self._waiter = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        # The step that is being written, and this process's share of the writing.
        self._saving: tuple[int, concurrent.futures.Future[None]] | None = None
        if process == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
            for scratch in self._folder.glob(f"*{_INCOMPLETE}"):
                shutil.rmtree(scratch)  # of a run that was cut short
        self._latest: int | None = share(max(self._steps(), default=None))[0]

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, which may be on its way."""
        return self._latest

    def save(self, state: State) -> None:
        """Copies the state to the host and writes it in the background."""
        self.finish()
        if self._latest == state.step:
            return
        self._latest = state.step
        scratch = self._scratch(state.step)
        if self._process == 0:
            with _named(state.step):
                scratch.mkdir()
                (scratch / _META).write_text(json.dumps(self._meta(state), indent=1))
        self._share(None)  # all see the folder
        for number, saver in self._savers.items():
            arrays = jax.tree.map(_global, self._arrays(state, number))
            with _named(state.step):
                saver.save(_part(scratch, number), args=ocp.args.PyTreeSave(arrays))
        self._saving = (state.step, self._waiter.submit(self._wait))

    def is_written(self) -> bool:
        """Whether nothing is being written here.

        Raises:
          OSError, or whatever orbax raises: it cannot be written.
        """
        if self._saving is None:
            return True
        is_done = self._saving[1].done()
        if is_done:
            self._join()
        return is_done

    def commit(self) -> None:
        """Completes what is being saved; to be called once all processes have written.

        Only the first process has something to do.
        """
        if self._saving is None:
            return
        step = self._join()
        self._saving = None
        if self._process == 0:
            with _named(step):
                self._scratch(step).rename(self._folder / str(step))
                for old in sorted(self._steps())[: -self._keep]:
                    # Whoever is killed meanwhile leaves no half of one.
                    scratch = (self._folder / str(old)).rename(self._scratch(old))
                    shutil.rmtree(scratch)
            logging.info("checkpoint of step %d is complete", step)

    def finish(self) -> None:
        """Waits until what was saved is complete."""
        if self._saving is not None:
            self._join()
            self._share(None)  # all have written
            self.commit()
            self._share(None)  # none goes on before it is complete

    def restore(self, state: State) -> State:
        """Returns the newest checkpoint, laid out as `state` is.

        Raises:
          ConfigError: it lacks a layer.
        """
        folder = self._folder / str(self._latest)
        meta = json.loads((folder / _META).read_text())
        like = {"params": _merged(state.params), "optimizer": _merged(state.optimizer)}
        wanted = jax.tree.map(_wanted, like)
        found: dict[str, dict[str, Any]] = {"params": {}, "optimizer": {}}
        reader = _reader(self._process)
        for number in sorted(set(meta["parts"].values())):
            there = [name for name, part in meta["parts"].items() if part == number]
            mine = {what: _only(layers, there) for what, layers in wanted.items()}
            if not mine["params"]:
                continue
            arguments = ocp.args.PyTreeRestore(
                mine,
                restore_args=ocp.checkpoint_utils.construct_restore_args(mine),
                partial_restore=True,
            )
            arrays = reader.restore(_part(folder, number), args=arguments)
            for what, layers in arrays.items():
                found[what] |= layers
        reader.close()
        missing = set(wanted["params"]) - set(found["params"])
        if missing:
            raise ConfigError(
                f"{folder} lacks the layers {sorted(missing)}.\n"
                "  It is of another model; pass another --workdir."
            )
        return State(
            step=meta["step"],
            updates=meta["updates"],
            params=_by_stage(found["params"], state.params),
            optimizer=_by_stage(found["optimizer"], state.optimizer),
            data=meta["data"],
        )

    def close(self) -> None:
        """Waits until what was saved is complete."""
        self.finish()
        self.abandon()

    def abandon(self) -> None:
        """Ends the threads, whatever is being written."""
        self._waiter.shutdown(wait=False)
        for saver in self._savers.values():
            saver.close()

    def _join(self) -> int:
        """Waits for this process's share of the writing; returns of which step."""
        assert self._saving is not None
        step, writing = self._saving
        with _named(step):
            writing.result()
        return step

    def _wait(self) -> None:
        for saver in self._savers.values():
            saver.wait_until_finished()

    def _steps(self) -> list[int]:
        if not self._folder.exists():
            return []
        return [int(x.name) for x in self._folder.iterdir() if x.name.isdigit()]

    def _scratch(self, step: int) -> pathlib.Path:
        return self._folder / f"{step}{_INCOMPLETE}"

    def _meta(self, state: State) -> dict[str, Any]:
        numbers = [self._parts.index(group) for group in self._groups]
        return {
            "step": state.step,
            "updates": state.updates,
            "data": state.data,
            "parts": {
                name: number
                for names, number in zip(self._layers, numbers, strict=True)
                for name in names
            },
        }

    def _arrays(self, state: State, number: int) -> dict[str, dict[str, Any]]:
        """The arrays of one part by layer name, all its stages together."""
        group = self._parts[number]
        mine = [s for s, each in enumerate(self._groups) if each == group]
        return {
            "params": _merged([state.params[s] for s in mine]),
            "optimizer": _merged([state.optimizer[s] for s in mine]),
        }


@contextlib.contextmanager
def _named(step: int) -> Iterator[None]:
    """Has an error say what was being written."""
    try:
        yield
    except Exception as error:
        error.add_note(f"while saving step {step}")
        raise


def _saver(number: int, group: Sequence[int]) -> ocp.AsyncCheckpointer:
    """Returns what writes one part, in each process of its group."""
    options = MultiprocessingOptions(
        primary_host=group[0],
        active_processes=set(group),
        barrier_sync_key_prefix=f"part{number}",
    )
    arrays = ocp.type_handlers.ArrayHandler(
        primary_host=group[0],
        use_replica_parallel=False,  # the first copy is written, see `_global`
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(
            multiprocessing_options=options, type_handler_registry=registry
        ),
        multiprocessing_options=options,
        # Else orbax announces that a folder is there under a name that knows neither
        # part nor group: one group takes away what another waits for, or believes it.
        async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
    )


def _reader(process: int) -> ocp.Checkpointer:
    """Returns what reads parts in one process, whatever the others do."""
    options = MultiprocessingOptions(
        primary_host=process,
        active_processes={process},
        barrier_sync_key_prefix=f"reader{process}",
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=options),
        multiprocessing_options=options,
    )


def _global(array: jax.Array) -> jax.Array:
    """Returns an array as orbax takes it: the same buffers.

    Among several processes it refuses arrays that one of them has alone. Such a one is
    given out as one with a copy elsewhere: the copy that is written is the first, and
    nobody else is asked.
    """
    if jax.process_count() == 1 or not array.is_fully_addressable:
        return array
    sharding = array.sharding
    if isinstance(sharding, jax.sharding.NamedSharding):
        mine, axes, spec = (
            sharding.mesh.devices,
            sharding.mesh.axis_names,
            sharding.spec,
        )
    else:
        mine, axes, spec = np.array([*sharding.device_set]), ("device",), _WHOLE
    strangers = [d for d in jax.devices() if d.process_index != jax.process_index()]
    if len(strangers) < mine.size:  # one is enough for a copy on one device
        array = jax.device_put(array, mine.flat[0])
        mine, axes, spec = mine.reshape(-1)[:1], ("device",), _WHOLE
    theirs = np.array(strangers[: mine.size]).reshape(mine.shape)
    mesh = jax.sharding.Mesh(np.stack([mine, theirs]), ("copy", *axes))
    return jax.make_array_from_single_device_arrays(
        array.shape,
        jax.sharding.NamedSharding(mesh, spec),
        [shard.data for shard in array.addressable_shards],
    )


def _wanted(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)


def _part(folder: pathlib.Path, number: int) -> pathlib.Path:
    return folder / f"part_{number}"


def _only(layers: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: layers[name] for name in names if name in layers}


def _merged(trees: Trees) -> dict[str, Any]:
    return {name: layer for tree in trees for name, layer in tree.items()}


def _by_stage(layers: Mapping[str, Any], like: Trees) -> Trees:
    return [{name: layers[name] for name in tree} for tree in like]
