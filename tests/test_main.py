"""The command's own paths: both config files, small, from data files to scores."""

import dataclasses
import json
import os
import pathlib
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import ml_collections
import pytest
import tokenizers
from PIL import Image

from rrfp_jax import config_border
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.trainer import Trainer
from rrfp_jax.train.workdir import claim
from tests.test_bad_input import Case, config_of
from tests.train import tiny
from tests.train.conftest import cheap_compiling, programs  # noqa: F401

ROOT = pathlib.Path(__file__).parents[1]
FIXED = {"pipeline.order": "fixed", "pipeline.hint": "1f1b"}
SCORES = {"eval_loss", "eval_accuracy", "eval_exact_match"}


def trained(
    file: str, changes: dict[str, Any], folder: pathlib.Path
) -> dict[str, float]:
    """Runs a small config with changes; returns what the command would print."""
    config = config_of(Case(file, changes, ()), folder)
    made = config_border.from_config_dict(TrainConfig, config)
    return Trainer(made).run(folder / "run")


def write_tokenizer(path: pathlib.Path) -> None:
    """Writes a tokenizer.json of words, with an end token."""
    words = ["[UNK]", "</s>", "a", "b", "ab", "c", "d"]
    model = tokenizers.models.WordLevel(
        {word: i for i, word in enumerate(words)}, unk_token="[UNK]"
    )
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(path))


def write_conversations(folder: pathlib.Path, count: int = 24) -> pathlib.Path:
    """Writes LLaVA records with none, one or two images each."""
    rng = random.Random(0)
    for name in ("black", "white"):
        shade = 255 * (name == "white")
        Image.new("RGB", (20, 30), (shade, shade, shade)).save(folder / f"{name}.png")
    records = []
    for number in range(count):
        names = rng.choices(["black", "white"], k=rng.randint(0, 2))
        question = "<image>" * len(names) + "Which?"
        records.append(
            {
                "id": str(number),
                "image": [f"{name}.png" for name in names],
                "conversations": [
                    {"from": "human", "value": question},
                    {"from": "gpt", "value": names[0] if names else "none"},
                ],
            }
        )
    path = folder / "conversations.json"
    path.write_text(json.dumps(records))
    return path


def test_gpt3_with_a_tokenizer_trains_on_json_lines_in_fixed_order(
    tmp_path: pathlib.Path,
):
    texts = tiny.write_texts(tmp_path / "texts.jsonl")
    write_tokenizer(tmp_path / "tokenizer.json")
    changes = {
        **FIXED,
        "data.source": "jsonl",
        "data.paths": (str(texts),),
        "data.eval_paths": (str(texts),),
        "data.tokenizer": str(tmp_path / "tokenizer.json"),
        "model.language.kind": "gpt3",
        "model.language.num_kv_heads": 4,
        "model.language.vocab_size": 8,
        "optimizer.learning_rate": 0.03,
    }
    scores = trained("lm", changes, tmp_path)
    assert scores.keys() == SCORES  # a token is no byte
    losses = list(tiny.losses(tmp_path / "run").values())
    assert len(losses) == 6
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_images_and_conversations_of_the_user_train_in_fixed_order(
    tmp_path: pathlib.Path,
):
    records = write_conversations(tmp_path)
    changes = {
        **FIXED,
        "data.source": "llava",
        "data.paths": (str(records),),
        "data.eval_paths": (str(records),),
        "data.image_folder": str(tmp_path),
        "data.length_buckets": (80,),
        "model.language.max_length": 80,
    }
    scores = trained("mm", changes, tmp_path)
    assert scores.keys() == {*SCORES, "eval_bits_per_byte"}
    losses = list(tiny.losses(tmp_path / "run").values())
    assert len(losses) == 6
    assert losses[-1] < losses[0]


WRONG = {
    "typo": ("config.pipeline.num_rank=4", "pipeline.num_rank is", "num_ranks?"),
    "devices": (
        "config.mesh.num_cpu_devices=2",
        "needs 4 devices; there are 2.",
        "--config.mesh.num_cpu_devices=4.",
    ),
    "order": ("config.pipeline.hint=gone.csv", "gone.csv", "--config.pipeline.hint to"),
    "image": ("config=DIR/llava.py:small", "gone.png", "image_folder"),
    "other run": (
        "config.train.seed=1",
        "train.seed: 0 there, 1 now",
        "Pass another --workdir, or the settings of that run.",
    ),
}


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Starts all wrong commands at once; returns status, stderr and folder of each."""
    folder = tmp_path_factory.mktemp("refusals")
    write_conversations(folder)
    gone = (folder / "conversations.json").read_text().replace("white", "gone")
    (folder / "gone.json").write_text(gone)
    config = (ROOT / "configs" / "mm.py").read_text()
    for old, new in {
        '"source": "digits"': '"source": "llava"',
        '"paths": ()': f'"paths": ("{folder}/gone.json",)',
        '"image_folder": ""': '"image_folder": "."',
        '"length_buckets": (40,)': '"length_buckets": (80,)',
        '"max_length": 40': '"max_length": 80',
    }.items():
        assert old in config
        config = config.replace(old, new)
    (folder / "llava.py").write_text(config)
    started = {}
    for name, (flag, *_) in WRONG.items():
        workdir = folder / name.replace(" ", "_")
        if name == "other run":
            config = config_of(Case("mm", {}, ()), folder)
            made = config_border.from_config_dict(TrainConfig, config)
            claim(workdir, dataclasses.asdict(made))
        command = [sys.executable, "-m", "rrfp_jax.main", f"--workdir={workdir}"]
        if not flag.startswith("config="):
            command += ["--config=configs/mm.py:small"]
        command += [f"--{flag.replace('DIR', str(folder))}"]
        before = contents(workdir)
        started[name] = before, workdir, start(command)
    return {
        name: (process.communicate(timeout=200)[1], process.returncode, before, workdir)
        for name, (before, workdir, process) in started.items()
    }


def start(command: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() if path.is_file() else b""
        for path in (folder, *folder.rglob("*"))
        if path.exists()
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_the_command_ends_wrong_input_with_one_message_and_status_2(
    name: str, refusals: dict[str, Any]
):
    stderr, status, before, workdir = refusals[name]
    assert status == 2, stderr
    log, _, message = stderr.partition("ConfigError: ")
    what, remedy = WRONG[name][1:]
    assert what in message
    assert remedy in message.splitlines()[-1]
    assert all(line.startswith("  ") for line in message.splitlines()[1:])
    assert "Traceback" not in stderr
    assert "compile" not in log
    assert contents(workdir) == before


def test_small_and_large_configs_have_the_same_settings():
    for file in ("lm", "mm"):
        configs = [load(file, variant) for variant in ("", "small")]
        large, small = map(set, map(paths, configs))
        assert large == small
        for config in configs:
            config_border.from_config_dict(TrainConfig, config)


def test_an_unknown_variant_names_the_one_there_is():
    for file in ("lm", "mm"):
        with pytest.raises(ValueError, match=r"'tiny'.*'small'"):
            load(file, "tiny")


def load(file: str, variant: str) -> ml_collections.ConfigDict:
    scope: dict[str, Any] = {}
    exec((ROOT / "configs" / f"{file}.py").read_text(), scope)
    config: ml_collections.ConfigDict = scope["get_config"](variant)
    return config


def paths(config: ml_collections.ConfigDict, path: str = "") -> Iterator[str]:
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            yield from paths(value, f"{path}{name}.")
        else:
            yield f"{path}{name}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", ["lm", "mm"])
def test_the_command_trains_the_small_config_as_its_docstring_says(
    file: str, tmp_path: pathlib.Path
):
    command = [sys.executable, "-m", "rrfp_jax.main", f"--workdir={tmp_path}"]
    command += [f"--config=configs/{file}.py:small"]
    command += [f"--config.{name}={value}" for name, value in FIXED.items()]
    process = start(command)
    stdout, stderr = process.communicate(timeout=500)
    assert process.returncode == 0, stderr
    printed = dict(line.split() for line in stdout.splitlines())
    assert printed.keys() == {*SCORES, "eval_bits_per_byte"}
    assert "Traceback" not in stderr
    assert "Warning" not in stderr
    assert list(tiny.losses(tmp_path)) == [1, 2, 3, 4, 5, 6]
    for name in ("config.json", "checkpoints", "traces/step_000003.png"):
        assert (tmp_path / name).exists()
