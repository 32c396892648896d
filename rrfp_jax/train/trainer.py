"""The trainer: builds a run from its config and steps it to the end.

In a run of several processes each of them runs this, in step with the others: whatever
all need to know of one (losses, the norm of the gradient, a wish to stop) they exchange
once a step. The first process writes the metrics and the pictures.
"""

import contextlib
import dataclasses
import functools
import gc
import itertools
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging

from rrfp_jax.coordination.cluster import Cluster, alone
from rrfp_jax.data.microbatch import Microbatch
from rrfp_jax.data.tokenizer import ByteTokenizer
from rrfp_jax.observe.metrics import MetricsWriter
from rrfp_jax.observe.progress import progress
from rrfp_jax.runtime.outcome import Result
from rrfp_jax.train import workdir
from rrfp_jax.train.checkpoint import Checkpoints, State
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.evaluation import evaluate
from rrfp_jax.train.interrupts import Interrupts
from rrfp_jax.train.loop import Loop
from rrfp_jax.train.optimizer import Optimizer, Trees, schedule
from rrfp_jax.train.replica_steps import ReplicaSteps
from rrfp_jax.train.setup import set_up


class Trainer:
    """One run. `__init__` finds all that is wrong with it; `run` compiles and trains.

    Args:
      config: all of it.
      cluster: the processes of the run; None for this one alone.

    Raises:
      ConfigError: the config, the data or the machines do not make a run.
    """

    def __init__(self, config: TrainConfig, cluster: Cluster | None = None) -> None:
        self._config = config
        self.cluster = cluster or alone()
        setup = set_up(config, cluster=self.cluster)
        self._examples = setup.examples
        self._has_dropout = setup.has_dropout
        self._data, self._model = setup.data, setup.model
        self._cut, self._pipelines = setup.cut, setup.pipelines
        self._pipeline = setup.pipeline  # for what is the same in all replicas
        # By stage, its devices in all replicas.
        self._stages = [setup.replicas[rank] for rank in setup.cut.placement]
        self._optimizer = Optimizer(
            config.optimizer,
            config.train.num_steps,
            setup.cut,
            self._stages,
            self.cluster.process,
            self.cluster.all_gather,
        )
        self._steps = ReplicaSteps(
            setup.pipelines,
            self._stages,
            setup.cut,
            config.pipeline.num_microbatches,
            self.cluster,
        )
        self._schedule = schedule(config.optimizer, config.train.num_steps)
        self.interrupts = Interrupts(self.cluster.num_processes == 1)

    def run(
        self, folder: pathlib.Path, compilation_cache: pathlib.Path | None = None
    ) -> dict[str, float]:
        """Trains to the last step, from the newest checkpoint in `folder` if any.

        SIGTERM ends it after the step at hand, with a checkpoint of that. An interrupt
        (Ctrl-C) saves the last finished step before it goes on.

        Args:
          folder: where the run's files go; of this run, or new. All processes see it.
          compilation_cache: where compiled programs are kept for the next time.

        Returns:
          The figures of the last evaluation, empty where there is none.

        Raises:
          ConfigError: the folder is of another run.
          KeyboardInterrupt: after all that was finished is saved.
        """
        config, cluster = self._config, self.cluster
        if cluster.is_first:
            workdir.claim(folder, dataclasses.asdict(config))
        cluster.all_gather(None)
        if compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.interrupts)
            stack.callback(self._data.train.close)
            checkpoints = stack.enter_context(self._checkpoints(folder))
            metrics = None
            if cluster.is_first:
                metrics = stack.enter_context(MetricsWriter(folder))
            state = self._initial_state()
            if checkpoints.latest is not None:
                state = checkpoints.restore(state)
                self._data.train.restore(state.data)
                logging.info("continuing from step %d", state.step)
            if metrics is not None:
                metrics.rewind(state.step)
            self._compile(state)
            # What JAX has traced and compiled stays: without this each full collection,
            # now between steps, would walk all of it again.
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            return Loop(self, config, folder, state, checkpoints, metrics).run()

    @contextlib.contextmanager
    def _checkpoints(self, folder: pathlib.Path) -> Iterator[Checkpoints]:
        checkpoints = Checkpoints(
            folder,
            self._config.train.keep_checkpoints,
            [[layer.name for layer in layers] for layers in self._cut.layers],
            [stage.processes for stage in self._stages],
            self.cluster.process,
            self.cluster.all_gather,
        )
        try:
            yield checkpoints
        except BaseException:
            # Alone, what is being written can be completed; else who knows who is left.
            if self.cluster.num_processes == 1:
                checkpoints.close()
            raise
        checkpoints.close()

    def _initial_state(self) -> State:
        """Initialises each stage where it lies; how layers are cut changes nothing."""
        params: Trees = []
        for layers, stage, like in zip(
            self._cut.layers,
            self._stages,
            self._pipeline.parameters.sharding_trees,
            strict=True,
        ):
            if not stage.is_here:
                params.append({})
                continue
            names = tuple(layer.name for layer in layers)
            init = functools.partial(_init, self._model.init, names)
            made = jax.jit(init, out_shardings=jax.tree.map(stage.over, like))
            params.append(made(np.uint32(self._config.train.seed)))
        optimizer = self._optimizer.init(params)
        return State(0, 0, params, optimizer, self._data.train.state())

    def _compile(self, state: State) -> None:
        """Compiles all that the run will need, and forbids more.

        No process goes on before all are there.
        """
        trained, evaluated = self._examples(self._has_dropout), self._examples(False)
        pipelines = self._pipelines.values()
        for backward, shapes in ((True, trained), (False, evaluated)):
            what = "compile training" if backward else "compile evaluation"
            total = sum(p.num_uncompiled(shapes, backward) for p in pipelines)
            with progress(total, what, "program") as bar:
                for pipeline in pipelines:
                    pipeline.compile(shapes, backward, bar.advance)
        with progress(1, "compile optimizer", "stage") as bar:
            self._optimizer.compile(state.params, state.optimizer)
            bar.advance()
        for pipeline in pipelines:
            pipeline.compiler.is_sealed = True
        self.cluster.all_gather(None)

    def next_batch(self) -> list[Microbatch]:
        """Returns the microbatches of this process's replicas, one after another.

        Raises:
          RuntimeError: there are no more, which must not be.
        """
        try:
            return next(self._data.train)
        except StopIteration:
            parts = self._data.share.parts
            raise RuntimeError(
                f"the training data of replicas {parts} have ended; they are to go on "
                "for ever."
            ) from None

    def step(self, state: State, batch: list[Microbatch]) -> "Figures":
        """Runs one step, forward, backward, update, and moves `state` on.

        A step that is not finite changes nothing but the count of steps and the
        position in the data. `state` is always that of a whole step: from the update
        on, interrupts are held back until the caller has reported the step and calls
        `interrupts.release`.
        """
        num_tokens = self._steps.num_tokens(batch)
        scale = 1 / max(num_tokens, 1)
        seed = self._config.train.seed if self._has_dropout else None
        results = self._steps.run(state.params, batch, scale, seed, state.step)
        loss = self._steps.loss(results, scale)
        grads = self._optimizer.reduce({q: r.grads for q, r in results.items()})
        norm = self._optimizer.norm(grads)
        is_finite = math.isfinite(norm) and math.isfinite(loss)
        self.interrupts.hold()
        if is_finite:
            state.params, state.optimizer = self._optimizer.update(
                state.params, state.optimizer, grads, norm
            )
            self._steps.copy_tied(state.params)
            state.updates += 1
        state.step += 1
        state.data = self._data.train.state()
        if not is_finite:
            logging.error(
                "step %d is not finite (loss %s, gradient norm %s), first at task %s "
                "(stage, kind, microbatch); nothing was updated",
                state.step,
                loss,
                norm,
                self._steps.culprit(results),
            )
        first = next(iter(results.values()))
        return Figures(
            dataclasses.replace(first, loss=loss), norm, num_tokens, is_finite
        )

    def evaluate(self, params: Trees) -> dict[str, float]:
        """Scores the held-out samples; empty where there are none."""
        if self._data.held_out is None:
            return {}
        is_bytes = isinstance(self._data.tokenizer, ByteTokenizer)
        count = self._config.train.eval_batches or None
        with contextlib.closing(self._data.evaluation()) as batches:
            chosen = itertools.islice(batches, count)
            run = functools.partial(self._scored, params)
            return evaluate(run, chosen, is_bytes, self.cluster.all_gather)

    def learning_rate(self, update: int) -> float:
        """Returns the rate of an update, counted from 0."""
        return float(self._schedule(update))

    def _scored(self, params: Trees, batch: list[Microbatch]) -> list[Result]:
        """Runs the forwards of a batch; returns what this process is to report."""
        return self._steps.to_report(self._steps.run(params, batch, backward=False))


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a step gives to report.

    Attributes:
      result: of the first replica that this process has a part in, but for the loss,
        which is that of the step.
      norm: of the gradient.
      num_tokens: of the step.
      is_finite: whether loss and norm are.
    """

    result: Result
    norm: float
    num_tokens: float
    is_finite: bool


def _init(init: Any, names: tuple[str, ...], seed: Any) -> Any:
    return init(jax.random.key(seed), names=names)
