"""Steps a run to its end, writing what the config asks for."""

import pathlib
import time
from typing import TYPE_CHECKING

from absl import logging

from rrfp_jax.core import trace as trace_lib
from rrfp_jax.observe import chrome_trace, html_timeline, timeline
from rrfp_jax.observe.metrics import MetricsWriter
from rrfp_jax.observe.progress import progress
from rrfp_jax.sim.report import bubble_fraction
from rrfp_jax.train.checkpoint import Checkpoints, State
from rrfp_jax.train.config import TrainConfig

if TYPE_CHECKING:
    from rrfp_jax.train.trainer import Trainer


class Loop:
    """One run, from its state on.

    Args:
      trainer: makes the steps.
      config: of the run.
      folder: where its files go.
      state: to go on from.
      checkpoints: where it is saved.
      metrics: where figures go; None in all processes but the first.
    """

    def __init__(
        self,
        trainer: "Trainer",
        config: TrainConfig,
        folder: pathlib.Path,
        state: State,
        checkpoints: Checkpoints,
        metrics: MetricsWriter | None,
    ) -> None:
        self._trainer = trainer
        self._config = config.train
        self._limit_bytes = config.pipeline.policy.memory_limit_bytes
        self._folder = folder
        self._state = state
        self._checkpoints = checkpoints
        self._metrics = metrics

    def run(self) -> dict[str, float]:
        """Runs; on an interrupt, saves the last finished step first."""
        scores: dict[str, float] = {}
        first, last = self._state.step, self._config.num_steps
        if first == last:  # a finished run, or one stopped in its last evaluation
            is_known = self._metrics is not None and self._metrics.has(last, _SCORE)
            return self._evaluate(should_write=not is_known)
        try:
            with progress(last, "train", "step", initial=first) as bar:
                while self._state.step < last and not self._must_stop():
                    figures = self._step()
                    bar.advance({k: figures[k] for k in _SHOWN})
                    if self._is_due(self._config.eval_every):
                        scores = self._evaluate()
                    if self._is_due(self._config.checkpoint_every):
                        self._checkpoints.save(self._state)
        except KeyboardInterrupt:
            if self._trainer.cluster.num_processes == 1:
                logging.warning("interrupted; saving step %d", self._state.step)
                self._checkpoints.save(self._state)
            raise
        return scores

    def _must_stop(self) -> bool:
        """Whether any process was asked to stop; if so, saves.

        Also completes a checkpoint that all processes have written.

        Raises:
          KeyboardInterrupt: Ctrl-C was what asked.
        """
        interrupts = self._trainer.interrupts
        mine = (
            interrupts.was_asked,
            interrupts.was_interrupted,
            self._checkpoints.is_written(),
        )
        told = self._trainer.cluster.all_gather(mine)
        if all(is_written for *_, is_written in told):
            self._checkpoints.commit()
        if not any(was_asked for was_asked, *_ in told):
            return False
        logging.warning("asked to stop; saving step %d", self._state.step)
        self._checkpoints.save(self._state)
        self._trainer.cluster.has_agreed_to_end = True
        if any(was_interrupted for _, was_interrupted, _ in told):
            self._checkpoints.finish()
            raise KeyboardInterrupt
        return True

    def _is_due(self, every: int) -> bool:
        step = self._state.step
        return step == self._config.num_steps or bool(every and step % every == 0)

    def _step(self) -> dict[str, float]:
        began_s = time.perf_counter()
        batch = self._trainer.next_batch()
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
        is_last = step == self._config.num_steps
        if self._metrics and (step % self._config.log_every == 0 or is_last):
            self._metrics.write(step, line)
        if self._metrics and self._is_traced(step):
            self._write_trace(result.trace)
        self._trainer.interrupts.release()
        return line

    def _evaluate(self, should_write: bool = True) -> dict[str, float]:
        scores = self._trainer.evaluate(self._state.params)
        if scores:
            if self._metrics and should_write:
                self._metrics.write(self._state.step, scores)
            named = ", ".join(f"{name} {value:.4f}" for name, value in scores.items())
            logging.info("step %d: %s", self._state.step, named)
        return scores

    def _is_traced(self, step: int) -> bool:
        first = self._config.trace_step
        return 0 < first <= step < first + self._config.num_traced

    def _write_trace(self, trace: trace_lib.Trace) -> None:
        """Writes a step's trace, and pictures of the first one."""
        folder = self._folder / "traces"
        folder.mkdir(exist_ok=True)
        stem = f"step_{self._state.step:06d}"
        (folder / f"{stem}.trace.json").write_text(trace_lib.to_json(trace))
        if self._state.step != self._config.trace_step:
            return
        panels = [(f"step {self._state.step}", trace)]
        timeline.draw(panels, folder / f"{stem}.png", self._limit_bytes)
        html_timeline.draw(panels, folder / f"{stem}.html", self._limit_bytes)
        chrome_trace.write(trace, folder / f"{stem}.perfetto.json")


_SHOWN = ("loss", "tokens_per_s", "step_time_s", "bubble")
_SCORE = "eval_loss"  # what shows that a step was evaluated
