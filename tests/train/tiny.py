"""The smallest runs that show a trainer's mathematics, and how to drive them.

`Live` is the only place in these tests that reaches into the trainer: a step at a time,
where the public `Trainer.run` only goes from start to end.
"""

import json
import pathlib
import random
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rrfp_jax import config_border
from rrfp_jax.core import graph, order_csv
from rrfp_jax.core.policies import Policy
from rrfp_jax.data.microbatch import Microbatch
from rrfp_jax.runtime.outcome import Result
from rrfp_jax.runtime.pipeline import Pipeline
from rrfp_jax.train import feeds
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.trainer import Figures, Trainer

NUM_STEPS = 20
_IMAGE = {"image_size": (8, 8), "channels": 1, "patch_size": 4}  # 4 tokens


def write_texts(path: pathlib.Path, count: int = 60, seed: int = 0) -> pathlib.Path:
    """Writes lines of JSON with short random texts."""
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abcd ", k=rng.randint(5, 40))) for _ in range(count)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def lm(texts: pathlib.Path, changes: dict[str, Any] | None = None) -> TrainConfig:
    """Returns a text run: embed, 2 blocks, head on 4 ranks."""
    return _config(
        {
            "data.source": "jsonl",
            "data.paths": (str(texts),),
            "data.length_buckets": (16,),
            "model.language.num_layers": 2,
            "model.language.max_length": 16,
            **(changes or {}),
        }
    )


def mm(changes: dict[str, Any] | None = None) -> TrainConfig:
    """Returns a multimodal run, tied: 3 layers of vision, 3 of language, 4 ranks."""
    image = {f"data.{name}": value for name, value in _IMAGE.items()}
    vision = {"width": 16, "num_layers": 1, "num_heads": 2, "mlp_width": 16, **_IMAGE}
    return _config(
        {
            "data.source": "digits",
            "data.length_buckets": (48,),
            "data.image_buckets": (0, 4),
            "model.language.num_layers": 1,
            "model.language.max_length": 48,
            "model.language.qk_norm": True,
            "model.language.tied": True,
            **image,
            **{f"model.vision.{name}": value for name, value in vision.items()},
            **(changes or {}),
        }
    )


def _config(changes: dict[str, Any]) -> TrainConfig:
    language = {"width": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8}
    tree: dict[str, Any] = {
        "data": {"batch_size": 8, "num_workers": 1, "prefetch": 2, "progress": False},
        "model": {"language": {"vocab_size": 260, "mlp_width": 16, **language}},
        "pipeline": {"num_ranks": 4, "num_microbatches": 4},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 3},
        "train": {"num_steps": NUM_STEPS},
    }
    for path, value in changes.items():
        *groups, name = path.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})
        node[name] = value
    return config_border.from_config_dict(TrainConfig, tree)


def run(config: TrainConfig, folder: pathlib.Path) -> list[dict[str, Any]]:
    """Trains to the end; returns the lines of the steps, evaluations left out."""
    Trainer(config).run(folder)
    return lines(folder)


def lines(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the lines of `metrics.jsonl` that are of training steps."""
    text = (folder / "metrics.jsonl").read_text()
    return [line for line in map(json.loads, text.splitlines()) if "loss" in line]


def losses(folder: pathlib.Path) -> dict[int, float]:
    """Returns the loss of each step; fails if a step has two."""
    found = lines(folder)
    by_step = {line["step"]: line["loss"] for line in found}
    assert len(by_step) == len(found), "a step has two lines"
    return by_step


class Live:
    """A trainer that is stepped by hand.

    Without `is_compiled` programs are compiled as they are used, which leaves out the
    optimizer: `step` does not work then.
    """

    def __init__(self, config: TrainConfig, is_compiled: bool = True) -> None:
        self.config = config
        self.trainer = Trainer(config)
        self.state = self.trainer._initial_state()
        if is_compiled:
            self.trainer._compile(self.state)

    @property
    def pipeline(self) -> Pipeline:
        return self.trainer._pipeline

    def next_batch(self) -> list[Microbatch]:
        return next(self.trainer._data.train)

    def step(self, batch: list[Microbatch] | None = None) -> Figures:
        return self.trainer.step(self.state, batch or self.next_batch())

    def forward_backward(self, batch: list[Microbatch], step: int = 0) -> Result:
        """Runs a step without update, so that it can be run again."""
        seed = self.config.train.seed if self.trainer._has_dropout else None
        arrays = feeds.feeds(batch, seed, step)
        num_tokens = sum(microbatch.num_tokens for microbatch in batch)
        return self.pipeline.run(self.state.params, arrays, 1 / num_tokens)

    def params(self) -> dict[str, Any]:
        """Returns the parameters by layer, on the host."""
        return by_layer(self.state.params)

    def optimizer(self) -> dict[str, Any]:
        """Returns the states of the optimizer by layer, on the host."""
        return by_layer(self.state.optimizer)

    def close(self) -> None:
        self.trainer._data.train.close()


def by_layer(trees: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins trees by stage into one by layer, copied to the host."""
    joined = {name: layer for tree in trees for name, layer in tree.items()}
    copied: dict[str, Any] = jax.tree.map(lambda x: np.array(x, copy=True), joined)
    return copied


def shuffled_hint(of: graph.PipelineGraph, folder: pathlib.Path, seed: int) -> Policy:
    """Returns a policy with a hint that ranks the tasks at random."""
    rng = random.Random(seed)
    mixed = [rng.sample(of.tasks(rank), of.num_tasks(rank)) for rank in range(4)]
    path = folder / f"hint_{seed}.csv"
    path.write_text(order_csv.to_csv(mixed))
    return Policy(hint=str(path))


def checkpoint(folder: pathlib.Path, step: int | None = None) -> tuple[Any, Any]:
    """Returns arrays and metadata of a checkpoint, read without any trainer."""
    found = folder.absolute() / "checkpoints"
    steps = [int(each.name) for each in found.iterdir() if each.name.isdigit()]
    found /= str(max(steps) if step is None else step)
    arrays: dict[str, Any] = {"params": {}, "optimizer": {}}
    with ocp.PyTreeCheckpointer() as reader:
        for part in sorted(found.glob("part_*")):
            there = reader.metadata(part).item_metadata.tree
            plain = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), there)
            for what, layers in reader.restore(part, restore_args=plain).items():
                arrays[what] |= layers
    return arrays, json.loads((found / "meta.json").read_text())
