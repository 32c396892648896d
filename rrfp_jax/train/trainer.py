"""The trainer: builds a run from its config and steps it to the end."""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import time

import jax
from absl import logging

from rrfp_jax.core import trace as trace_lib
from rrfp_jax.data.microbatch import Microbatch
from rrfp_jax.data.tokenizer import ByteTokenizer
from rrfp_jax.observe import chrome_trace, timeline
from rrfp_jax.observe.metrics import MetricsWriter
from rrfp_jax.observe.progress import progress
from rrfp_jax.runtime.pipeline import Result
from rrfp_jax.sim.report import bubble_fraction
from rrfp_jax.train import feeds, workdir
from rrfp_jax.train.checkpoint import Checkpoints, State
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.evaluation import evaluate
from rrfp_jax.train.interrupts import Interrupts
from rrfp_jax.train.optimizer import Optimizer, Trees, schedule
from rrfp_jax.train.setup import set_up


class Trainer:
    """One run. `__init__` finds all that is wrong with it; `run` compiles and trains.

    Raises:
      ConfigError: the config, the data or the machine do not make a run.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        setup = set_up(config)
        self._examples = setup.examples
        self._has_dropout = setup.has_dropout
        self._data, self._model = setup.data, setup.model
        self._cut, self._pipeline = setup.cut, setup.pipeline
        self._optimizer = Optimizer(
            config.optimizer,
            config.train.num_steps,
            setup.cut,
            [setup.ranks[rank] for rank in setup.cut.placement],
        )
        self._schedule = schedule(config.optimizer, config.train.num_steps)
        self.interrupts = Interrupts()

    def run(
        self, folder: pathlib.Path, compilation_cache: pathlib.Path | None = None
    ) -> dict[str, float]:
        """Trains to the last step, from the newest checkpoint in `folder` if any.

        An interrupt (Ctrl-C) saves the last finished step before it goes on.

        Args:
          folder: where the run's files go; of this run, or new.
          compilation_cache: where compiled programs are kept for the next time.

        Returns:
          The figures of the last evaluation, empty where there is none.

        Raises:
          ConfigError: the folder is of another run.
          KeyboardInterrupt: after all that was finished is saved.
        """
        config = self._config
        workdir.claim(folder, dataclasses.asdict(config))
        if compilation_cache is not None:
            jax.config.update("jax_compilation_cache_dir", str(compilation_cache))
        checkpoints = Checkpoints(folder, config.train.keep_checkpoints)
        with (
            self.interrupts,
            contextlib.closing(self._data.train),
            contextlib.closing(checkpoints),
            MetricsWriter(folder) as metrics,
        ):
            state = self._initial_state()
            if checkpoints.latest is not None:
                state = checkpoints.restore(state)
                self._data.train.restore(state.data)
                logging.info("continuing from step %d", state.step)
            metrics.rewind(state.step)
            self._compile(state)
            loop = _Loop(self, folder, state, checkpoints, metrics)
            return loop.run()

    def _initial_state(self) -> State:
        """Initialises each stage where it lies; how layers are cut changes nothing."""
        key = jax.random.key(self._config.train.seed)
        params: Trees = []
        for layers, like in zip(
            self._cut.layers,
            self._pipeline.parameters.sharding_trees,
            strict=True,
        ):
            names = tuple(layer.name for layer in layers)
            init = functools.partial(self._model.init, names=names)
            params.append(jax.jit(init, out_shardings=like)(key))
        optimizer = self._optimizer.init(params)
        return State(0, 0, params, optimizer, self._data.train.state())

    def _compile(self, state: State) -> None:
        """Compiles all that the run will need, and forbids more."""
        trained, evaluated = self._examples(self._has_dropout), self._examples(False)
        for backward, shapes in ((True, trained), (False, evaluated)):
            what = "compile training" if backward else "compile evaluation"
            total = self._pipeline.num_uncompiled(shapes, backward)
            with progress(total, what, "program") as bar:
                self._pipeline.compile(shapes, backward, bar.advance)
        with progress(1, "compile optimizer", "stage") as bar:
            self._optimizer.compile(state.params, state.optimizer)
            bar.advance()
        self._pipeline.compiler.is_sealed = True

    def step(self, state: State, batch: list[Microbatch]) -> "Figures":
        """Runs one step, forward, backward, update, and moves `state` on.

        A step that is not finite changes nothing but the count of steps and the
        position in the data. `state` is always that of a whole step: from the update
        on, interrupts are held back until the caller has reported the step and calls
        `interrupts.release`.
        """
        num_tokens = sum(microbatch.num_tokens for microbatch in batch)
        seed = self._config.train.seed if self._has_dropout else None
        arrays = feeds.feeds(batch, seed, state.step)
        result = self._pipeline.run(state.params, arrays, 1 / max(num_tokens, 1))
        norm = self._optimizer.norm(result.grads)
        is_finite = math.isfinite(norm) and math.isfinite(result.loss)
        self.interrupts.hold()
        if is_finite:
            state.params, state.optimizer = self._optimizer.update(
                state.params, state.optimizer, result.grads, norm
            )
            state.updates += 1
        state.step += 1
        state.data = self._data.train.state()
        if not is_finite:
            logging.error(
                "step %d is not finite (loss %s, gradient norm %s), first at task %s "
                "(stage, kind, microbatch); nothing was updated",
                state.step,
                result.loss,
                norm,
                result.culprit(),
            )
        return Figures(result, norm, num_tokens, is_finite)

    def evaluate(self, params: Trees) -> dict[str, float]:
        """Scores the held-out samples; empty where there are none."""
        if self._data.held_out is None:
            return {}
        is_bytes = isinstance(self._data.tokenizer, ByteTokenizer)
        count = self._config.train.eval_batches or None
        with contextlib.closing(self._data.evaluation()) as batches:
            chosen = itertools.islice(batches, count)
            return evaluate(self._pipeline, params, chosen, is_bytes)

    def learning_rate(self, update: int) -> float:
        """Returns the rate of an update, counted from 0."""
        return float(self._schedule(update))


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a step gives to report."""

    result: Result
    norm: float
    num_tokens: float
    is_finite: bool


class _Loop:
    """Steps a run to its end, writing what the config asks for."""

    def __init__(
        self,
        trainer: Trainer,
        folder: pathlib.Path,
        state: State,
        checkpoints: Checkpoints,
        metrics: MetricsWriter,
    ) -> None:
        self._trainer = trainer
        self._config = trainer._config.train
        self._limit_bytes = trainer._config.pipeline.policy.memory_limit_bytes
        self._folder = folder
        self._state = state
        self._checkpoints = checkpoints
        self._metrics = metrics

    def run(self) -> dict[str, float]:
        """Runs; on an interrupt, saves the last finished step first."""
        scores: dict[str, float] = {}
        first, last = self._state.step, self._config.num_steps
        if first == last:  # a finished run, or one stopped in its last evaluation
            is_known = self._metrics.has(last, "eval_loss")
            return self._evaluate(should_write=not is_known)
        try:
            with progress(last, "train", "step", initial=first) as bar:
                for _ in range(first, last):
                    figures = self._step()
                    shown = {k: figures[k] for k in _SHOWN}
                    bar.advance(shown)
                    if self._is_due(self._config.eval_every):
                        scores = self._evaluate()
                    if self._is_due(self._config.checkpoint_every):
                        self._checkpoints.save(self._state)
        except KeyboardInterrupt:
            logging.warning("interrupted; saving step %d", self._state.step)
            self._checkpoints.save(self._state)
            raise
        return scores

    def _is_due(self, every: int) -> bool:
        step = self._state.step
        return step == self._config.num_steps or bool(every and step % every == 0)

    def _step(self) -> dict[str, float]:
        began_s = time.perf_counter()
        batch = next(self._trainer._data.train)
        rate = self._trainer.learning_rate(self._state.updates)
        figures = self._trainer.step(self._state, batch)
        elapsed_s = time.perf_counter() - began_s
        step, result = self._state.step, figures.result
        line = {
            "loss": result.loss,
            "step_time_s": elapsed_s,
            "tokens_per_s": figures.num_tokens / elapsed_s,
            "bubble": bubble_fraction(result.trace),
            "peak_in_flight": max(result.trace.peak_in_flight()),
            "peak_residual_bytes": max(result.trace.peak_bytes()),
            "grad_norm": figures.norm,
            "learning_rate": rate,
            "is_finite": int(figures.is_finite),
        }
        if step % self._config.log_every == 0 or step == self._config.num_steps:
            self._metrics.write(step, line)
        if step == self._config.trace_step:
            self._write_trace(result.trace)
        self._trainer.interrupts.release()
        return line

    def _evaluate(self, should_write: bool = True) -> dict[str, float]:
        scores = self._trainer.evaluate(self._state.params)
        if scores:
            if should_write:
                self._metrics.write(self._state.step, scores)
            named = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
            logging.info("step %d: %s", self._state.step, named)
        return scores

    def _write_trace(self, trace: trace_lib.Trace) -> None:
        folder = self._folder / "traces"
        folder.mkdir(exist_ok=True)
        stem = f"step_{self._state.step:06d}"
        panels = [(f"step {self._state.step}", trace)]
        timeline.draw(panels, folder / f"{stem}.png", self._limit_bytes)
        chrome_trace.write(trace, folder / f"{stem}.perfetto.json")
        (folder / f"{stem}.trace.json").write_text(trace_lib.to_json(trace))


_SHOWN = ("loss", "tokens_per_s", "step_time_s", "bubble")
