"""What a user gets wrong ends as one message, before anything is compiled.

Each case goes the way of the command: a config file, changed settings, the border, the
trainer. Some go through the command itself.
"""

import importlib.util
import json
import pathlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import ml_collections
import pytest
from PIL import Image

from rrfp_jax import config_border
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime import compiler
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.trainer import Trainer

ROOT = pathlib.Path(__file__).parents[1]


class Case(NamedTuple):
    """Settings changed in `configs/lm.py:small` or `mm.py:small`, and what is said."""

    file: str
    changes: dict[str, Any]
    words: tuple[str, ...]


def lm(changes: dict[str, Any], *words: str) -> Case:
    texts = {"data.source": "jsonl", "data.paths": ("DIR/good.jsonl",)}
    return Case("lm", {**texts, **changes}, words)


def mm(changes: dict[str, Any], *words: str) -> Case:
    return Case("mm", changes, words)


def llava(paths: str, changes: dict[str, Any], *words: str) -> Case:
    data = {"data.source": "llava", "data.paths": (paths,), "data.image_folder": "DIR"}
    return Case("mm", {**data, **changes}, words)


def hint(name: str, *words: str) -> Case:
    return lm({"pipeline.hint": f"DIR/{name}.csv"}, f"{name}.csv", *words)


FIXED = {"pipeline.order": "fixed", "pipeline.hint": "1f1b"}
INTERLEAVED = {
    "pipeline.num_ranks": 2,
    "pipeline.placement": "interleaved",
    "pipeline.num_chunks": 2,
}

LONG_ROWS = {"data.length_buckets": (256,), "model.language.max_length": 256}

# Settings: names, types, values.
SETTINGS = {
    "typo": lm(
        {"pipeline.num_rank": 4},
        "pipeline.num_rank is not a setting",
        "Did you mean --config.pipeline.num_ranks?",
    ),
    "wrong type": lm({"pipeline.num_ranks": "four"}, "num_ranks='four'", "an int"),
    "bool for int": lm({"train.num_steps": True}, "train.num_steps=True", "an int"),
    "value for group": lm({"mesh": 4}, "mesh=4", "group"),
    "limit 0": lm({"pipeline.in_flight_limit": 0}, "in_flight_limit=0"),
    "weight limit": lm({"pipeline.weight_limit": -1}, "weight_limit=-1"),
    "taper": lm({"pipeline.in_flight_taper": -0.5}, "in_flight_taper=-0.5"),
    "split": lm({"pipeline.split": "no"}, "split='no'", "as_needed, always"),
    "balance": lm({"pipeline.balance": "time"}, "balance='time'", "flops, measured"),
    "launch_ahead 0": lm({"pipeline.launch_ahead": 0}, "launch_ahead=0"),
    "hint": lm({"pipeline.hint": "bff"}, "hint='bff'", "bf, fb", "1f1b"),
    "order": lm({"pipeline.order": "strict"}, "order='strict'", "readiness, fixed"),
    "placement": lm({"pipeline.placement": "x"}, "placement='x'", "v_shaped"),
    "recompute": lm({"model.recompute": "all"}, "recompute='all'", "dots, stage"),
    "source": lm({"data.source": "c4"}, "data.source='c4'", "digits"),
    "kind": lm({"model.language.kind": "bert"}, "kind='bert'", "llama"),
    "rate": lm({"optimizer.learning_rate": -1.0}, "learning_rate=-1.0"),
    "b2": lm({"optimizer.b2": 1.0}, "optimizer.b2=1.0", "below 1"),
    "dropout": lm({"model.language.dropout": 1.0}, "dropout=1.0"),
    "warm-up": lm({"optimizer.warmup_steps": 6}, "warmup_steps=6", "train.num_steps=6"),
    "trace": lm({"train.trace_step": 7}, "trace_step=7", "train.num_steps=6"),
    "frozen": lm({"model.frozen": ("vision/",)}, "frozen", "'vision/'"),
    "all frozen": lm({"model.frozen": ("language/",)}, "frozen", "language/"),
    "chunks": lm({"pipeline.num_chunks": 2}, "num_chunks=2", "interleaved"),
}

# How the model is cut, and what runs when.
SHAPES = {
    "counts": lm({"pipeline.layer_counts": (1, 1, 1, 2)}, "[1, 1, 1, 2]", "4 layers"),
    "stages": lm({"pipeline.num_ranks": 5}, "5 stages", "4 layers", "num_ranks"),
    "length of counts": lm({"pipeline.layer_counts": (2, 2)}, "(2, 2)", "4 counts"),
    "two towers": mm({"pipeline.layer_counts": (1, 3, 1, 2)}, "[1, 3]", "'vision'"),
    "microbatches": lm(
        {"data.batch_size": 64, "pipeline.num_microbatches": 6},
        "pipeline.num_microbatches=6 does not divide data.batch_size=64.\n"
        "  Set --config.pipeline.num_microbatches to 4 or 8.",
    ),
    "C02": lm(
        {
            **INTERLEAVED,
            **FIXED,
            "data.batch_size": 6,
            "pipeline.num_microbatches": 3,
        },
        "3 microbatches on 2 ranks x 2 chunks",
        "--config.pipeline.num_microbatches to 2 or 4",
    ),
    "V": lm(
        {**FIXED, "pipeline.num_ranks": 2, "pipeline.placement": "v_shaped"},
        "(0, 1, 1, 0)",
    ),
    "zero bubble": lm(
        {"pipeline.order": "fixed", "pipeline.hint": "zb_v"},
        "(0, 1, 2, 3)",
        "--config.pipeline.placement to v_shaped",
    ),
    "chunks of ZB-H": lm(
        {**INTERLEAVED, "pipeline.order": "fixed", "pipeline.hint": "zb_h2"},
        "(0, 1, 0, 1)",
        "--config.pipeline.placement to one_each",
    ),
    "group": lm(
        {**INTERLEAVED, **FIXED, "pipeline.microbatch_group": 1},
        "microbatch_group=1",
        "the 2 ranks",
    ),
    "memory": lm(
        {"pipeline.memory_limit_gb": 1e-6},
        "memory_limit_gb=1e-06 cannot hold",
        "--config.pipeline.memory_limit_gb to 0.",
    ),
    "memory of an order": lm(
        {**FIXED, "pipeline.memory_limit_gb": 1e-3},
        "fixed order 1f1b keeps",
        "memory_limit_gb=0.001",
    ),
    "colocated counts": mm(
        {
            "pipeline.placement": "colocated",
            "pipeline.num_ranks": 2,
            "pipeline.layer_counts": (1, 1, 1, 2, 2),
        },
        "3 stages for 2 ranks",
    ),
    "CSV stuck": lm(
        {"pipeline.order": "fixed", "pipeline.hint": "DIR/stuck.csv"},
        "cannot finish",
        "!0B0",
        "misses 1B0",
    ),
    "depth": lm(
        {**FIXED, "pipeline.in_flight_limit": 2}, "4 microbatches", "in_flight_limit=2"
    ),
    "devices": lm(
        {"data.batch_size": 16, "mesh.data": 4},
        "num_ranks=4",
        "4 devices",
        "16 devices",
    ),
    "rows": lm({"mesh.data": 4}, "mesh.data=4", "2 rows"),
    "replicas": lm({"mesh.replicas": 3}, "mesh.replicas=3", "batch_size=8"),
    "microbatches of a replica": lm(
        {"mesh.replicas": 4}, "num_microbatches=4", "batch_size=2 of each of 4"
    ),
    "tower mesh": mm(
        {"mesh.vision_model": 2, "pipeline.balance": "measured"}, "vision_model=2"
    ),
    "no process": lm(
        {"cluster.coordinator": "host:1"}, "coordinator='host:1'", "process_id", "-1"
    ),
    "no coordinator": lm({"cluster.num_processes": 4}, "num_processes=4", "HOST:PORT"),
    "way of payloads": lm({"cluster.payloads": "pigeon"}, "'pigeon'", "transfer"),
    "no time": lm({"cluster.peer_timeout_s": 0.0}, "peer_timeout_s=0.0", "above 0"),
    "agreement": lm({"pipeline.agreement": "vote"}, "'vote'", "intersection"),
    "shards": lm(
        {"mesh.model": 3, "pipeline.num_ranks": 2},
        "mesh.model=3",
        "--config.mesh.model",
    ),
    "heads": lm({"model.language.num_heads": 3}, "num_kv_heads=2", "num_heads=3"),
    "gpt3 heads": lm({"model.language.kind": "gpt3"}, "num_kv_heads=2", "num_heads=4"),
    "vision heads": mm({"model.vision.num_heads": 5}, "num_heads=5", "width=32"),
    "length": lm({"model.language.max_length": 32}, "goes up to 64", "max_length=32"),
    "patches": mm({"data.patch_size": 5}, "patch_size=5", "(8, 8)"),
    "image sizes": mm(
        {"data.image_size": (16, 16)}, "image_size=(8, 8)", "data.image_size=(16, 16)"
    ),
    "images": mm({"data.image_buckets": (0, 2)}, "(0, 2)", "4 images"),
    "text with images": lm({"data.image_buckets": (0, 2)}, "(0, 2)", "text only"),
    "CSV gone": hint("gone", "cannot be read"),
    "CSV misses": hint("misses", "line 1", "misses 0B3"),
    "CSV repeats": hint("repeats", "line 1", "repeats 0F0"),
    "CSV foreign": hint("foreign", "line 1", "1F0"),
    "CSV garbage": hint("garbage", "line 1", "'hello'"),
    "CSV short": hint("short", "3 ranks", "has 4"),
}

# Files.
FILES = {
    "no match": lm({"data.paths": ("DIR/*.text",)}, "*.text", "data.paths"),
    "no eval": lm({"data.eval_paths": ("DIR/none",)}, "none", "data.eval_paths"),
    "empty": lm({"data.paths": ("DIR/empty.jsonl",)}, "empty.jsonl", "no text"),
    "broken": lm({"data.paths": ("DIR/broken.jsonl",)}, "broken.jsonl:2", "not JSON"),
    "no text": lm({"data.paths": ("DIR/keys.jsonl",)}, "keys.jsonl:1", "'txet'"),
    "no tokenizer": lm({"data.tokenizer": "DIR/good.jsonl"}, "good.jsonl", "tokenizer"),
    "vocabulary": lm(
        {"model.language.vocab_size": 100},
        "vocab_size=100",
        "259",
        "--config.model.language.vocab_size",
    ),
    "no image": llava("DIR/gone.json", {}, "gone.png", "gone.json, record 1"),
    "a bad image": llava("DIR/bad.json", {}, "good.jsonl", "not an image"),
    "placeholders": llava("DIR/twice.json", {}, "2 <image>", "1 images"),
    "long": llava("DIR/long.json", {}, "long.json", "(40,)", "length_buckets"),
    "many": llava("DIR/many.json", LONG_ROWS, "9 images", "(0, 4)"),
    "other folder": llava("DIR/gone.json", {"data.image_folder": "x"}, "'x'"),
}

CASES = {**SETTINGS, **SHAPES, **FILES}


def write_files(folder: pathlib.Path) -> None:
    """Writes what the cases read."""
    for name, text in {
        "good.jsonl": '{"text": "a text"}\n' * 20,
        "empty.jsonl": "",
        "broken.jsonl": '{"text": "a"}\n{"text": \n',
        "keys.jsonl": '{"txet": "a"}\n',
        **{f"{name}.csv": text for name, text in _orders().items()},
        "gone.json": _record("gone.png", "<image>"),
        "bad.json": _record("good.jsonl", "<image>"),
        "twice.json": _record("good.png", "<image><image>"),
        "long.json": _record("good.png", "<image>" + "long" * 50),
        "many.json": _record(["good.png"] * 9, "<image>" * 9),
    }.items():
        (folder / name).write_text(text)
    Image.new("L", (8, 8)).save(folder / "good.png")


def _orders() -> dict[str, str]:
    ranks = [[f"{r}{kind}{j}" for kind in "FB" for j in range(4)] for r in range(4)]
    first, rest = ranks[0], [",".join(rank) for rank in ranks[1:]]

    def whole(*entries: str) -> str:
        return "\n".join([",".join(entries), *rest]) + "\n"

    return {
        "misses": whole(*first[:-1]),
        "repeats": whole(*first, "0F0"),
        "foreign": whole(*first, "1F0"),
        "garbage": whole(*first, "hello"),
        "short": "\n".join(rest),
        "stuck": whole("0F0", "0B0", "0F1", "0B1", "0F2", "0B2", "0F3", "0B3"),
    }


def _record(images: Any, question: str) -> str:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "Yes."}]
    return json.dumps([{"id": "7", "image": images, "conversations": turns}])


def in_folder(value: Any, folder: pathlib.Path) -> Any:
    if isinstance(value, tuple):
        return tuple(in_folder(each, folder) for each in value)
    return value.replace("DIR", str(folder)) if isinstance(value, str) else value


def config_of(case: Case, folder: pathlib.Path) -> ml_collections.ConfigDict:
    """Returns what the config file would say, had its author changed it so."""
    path = ROOT / "configs" / f"{case.file}.py"
    spec = importlib.util.spec_from_file_location(f"config_{case.file}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config("small")
    config.unlock()
    for key, value in case.changes.items():
        *groups, name = key.split(".")
        node = config
        for group in groups:
            node = node[group]
        if name in node:
            del node[name]  # a ConfigDict would refuse another type
        node[name] = in_folder(value, folder)
    return config


def assert_well_said(message: str) -> None:
    """Checks the shape of style.md: what with values, then what to change."""
    first, *rest = message.split("\n")
    assert rest, message
    assert not first.startswith(" ")
    assert all(line.startswith("  ") for line in rest), message
    assert re.search(r"--(config\.\w|workdir)", message), message


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whoever compiles fails; a look at the record comes after the test."""
    seen = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        seen.append(args)
        raise AssertionError("something was compiled before the error")

    monkeypatch.setattr(compiler, "compile_stage", refuse)
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    yield
    assert not seen


def start(config: ml_collections.ConfigDict, folder: pathlib.Path) -> None:
    Trainer(config_border.from_config_dict(TrainConfig, config)).run(folder)


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_one_message_with_value_and_remedy(
    name: str, tmp_path: pathlib.Path
):
    case = CASES[name]
    write_files(tmp_path)
    config = config_of(case, tmp_path)
    with pytest.raises(ConfigError) as refused:
        start(config, tmp_path / "run")
    for word in case.words:
        assert word in str(refused.value)
    assert_well_said(str(refused.value))
    assert not (tmp_path / "run").exists()
