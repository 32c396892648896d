"""`rrfp_jax.main` with something wrong in it, for `test_failures`.

    SABOTAGE=late_compile python tests/coordination/saboteur.py --config=...

Which process does what is in the functions below, by the name in SABOTAGE. They reach
into the package, where a user's machine would reach into it.
"""

import dataclasses
import os
import re
import resource
import sys
import time
from typing import Any

import jax
import numpy as np
from absl import logging

from rrfp_jax import config_border, main
from rrfp_jax.data.loader import Loader
from rrfp_jax.runtime.compiler import Compiler
from rrfp_jax.runtime.executor import Executor
from rrfp_jax.train import stages
from rrfp_jax.train.checkpoint import Checkpoints
from rrfp_jax.train.trainer import Trainer
from rrfp_jax.transport.mail import Mail

STEP = 3  # in which things go wrong, from 1
PROCESS = int(re.findall(r"process_id=(\d+)", " ".join(sys.argv))[-1])


def launch_raises() -> None:
    """Launching 2F3 raises."""
    whole = Executor._run

    def run(self: Executor, task: Any) -> Any:
        if str(task) == "2F3":
            raise ValueError("boom")
        return whole(self, task)

    Executor._run = run


def stage_raises() -> None:
    """XLA raises in the fourth forward of stage 2: in fixed order, of microbatch 3.

    The process of rank 2 runs it; the others only trace it.
    """
    number = 0

    def work(x: Any) -> Any:
        nonlocal number
        number += 1
        if number == 4:
            raise ValueError("boom")
        return np.zeros_like(x)

    whole = stages._function

    def function(layers: Any, recompute: str, is_loss: bool) -> Any:
        fn = whole(layers, recompute, is_loss)
        if not any(layer.name.endswith("block_01") for layer in layers):
            return fn

        def broken(params: Any, inputs: Any, feed: Any) -> Any:
            out = fn(params, inputs, feed)

            def through(x: Any) -> Any:
                x0 = jax.lax.stop_gradient(x)
                shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
                return x + jax.pure_callback(work, shape, x0)

            leaves, tree = jax.tree.flatten(out)
            floats = [i for i, x in enumerate(leaves) if x.dtype == np.float32]
            leaves[floats[0]] = through(leaves[floats[0]])
            return tree.unflatten(leaves)

        return broken

    stages._function = function


def disk_is_full() -> None:
    """From the second checkpoint on, process 1 can write no file beyond 100 kB."""
    whole = Checkpoints.save

    def save(self: Checkpoints, state: Any) -> None:
        if PROCESS == 1 and state.step >= 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        whole(self, state)

    Checkpoints.save = save


def data_end() -> None:
    """The data of the last replica end after two batches."""
    whole, given = Loader.__next__, 0

    def following(self: Loader) -> Any:
        nonlocal given
        given += 1
        if PROCESS == 1 and given >= STEP:
            raise StopIteration
        return whole(self)

    Loader.__next__ = following


def letter_lost() -> None:
    """The first cotangent that process 1 sends in the third step is lost.

    So process 0 misses it, and the last ones are done and wait for process 0.
    """
    whole, step, has_lost = Mail.send, Trainer.step, False
    state = None

    def stepped(self: Trainer, now: Any, batch: Any) -> Any:
        nonlocal state
        state = now
        return step(self, now, batch)

    def send(self: Mail, to: int, kind: str, *args: Any, **kwargs: Any) -> None:
        nonlocal has_lost
        is_it = PROCESS == 1 and to == 0 and kind == "payload 0"
        if is_it and not has_lost and state and state.step + 1 == STEP:
            has_lost = True
            return
        whole(self, to, kind, *args, **kwargs)

    Mail.send, Trainer.step = send, stepped


def late_compile() -> None:
    """Process 2 compiles five seconds longer, and all log when they launch."""
    compile_one, run = Compiler._compile_one, Executor._run
    has_run = False

    def late(self: Compiler, *args: Any) -> Any:
        if PROCESS == 2:
            time.sleep(5)
        made = compile_one(self, *args)
        logging.warning("compiled %s at %.3f", PROCESS, time.monotonic())
        return made

    def launch(self: Executor, task: Any) -> Any:
        nonlocal has_run
        if not has_run:
            has_run = True
            logging.warning("launched %s at %.3f", task, time.monotonic())
        return run(self, task)

    Compiler._compile_one, Executor._run = late, launch


def not_finite() -> None:
    """Microbatch 2 of the third step gives inf at the last stage; states are kept."""
    whole = Trainer.step

    def step(self: Trainer, state: Any, batch: Any) -> Any:
        if state.step + 1 == STEP:
            bad = dict(batch[2].arrays)
            bad["mask_BL"] = np.full_like(bad["mask_BL"], np.inf)
            batch = [*batch]
            batch[2] = dataclasses.replace(batch[2], arrays=bad)
        return whole(self, state, batch)

    Trainer.step = step


if __name__ == "__main__":
    globals()[os.environ["SABOTAGE"]]()
    config_border.run(main.main)
