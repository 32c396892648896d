"""Shows what a run would cost, without running it.

    python -m rrfp_jax.inspect --config=configs/mm.py [--json=FILE]

Compiles every stage for every kind of microbatch that the config's buckets allow, with
the backward in two (B, W) and whole. Prints XLA's figures of the programs, and the
residuals that ranks would hold: what `pipeline.memory_limit_gb` limits. That setting
itself is not applied. XLA counts the body of a loop (`lax.scan`) once.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from rrfp_jax import config_border
from rrfp_jax.core.memory import GIB
from rrfp_jax.errors import ConfigError
from rrfp_jax.runtime.figures import KindCost
from rrfp_jax.train.config import TrainConfig
from rrfp_jax.train.inspection import Inspection, inspect
from rrfp_jax.train.setup import prepare

_Column = tuple[str, str, Sequence[str]]  # group, name, cells

_LEGEND = """\
One microbatch of each kind, on each device of a rank. FLOP, accessed: as XLA counts
them, the body of a loop once. whole: B and W as one program; ratio: (B + W) / whole.
memory: what a program allocates, temporary and output bytes, without the donated
accumulators. residuals: what F holds for B, and B for W. Ki = 1024, Mi = 1024 Ki."""


def main() -> None:
    """Inspects what the flags say."""
    config = config_border.from_config_dict(TrainConfig, flags.FLAGS["config"].value)
    file = flags.FLAGS["json"].value
    if file and not pathlib.Path(file).absolute().parent.is_dir():
        raise ConfigError(
            f"--json={file} is in a folder that does not exist.\n"
            "  Make the folder, or pass another --json."
        )
    prepare(config)
    found = inspect(config)
    if file:
        pathlib.Path(file).write_text(to_json(found))
    print(to_text(found))


def to_text(found: Inspection) -> str:
    """Returns the tables: a kind of microbatch each, then the ranks, then totals."""
    parts = []
    for bucket, kind in zip(found.buckets, found.kinds, strict=True):
        title = f"{bucket.rows} rows of {bucket.length} tokens"
        if bucket.num_images:
            title += f", {bucket.num_images} images"
        summary = (
            f"F + B + W: {_short(kind.flops)}FLOP; "
            f"largest stage / mean: {kind.imbalance:.3f}"
        )
        parts.append(f"{title}\n{_table(_stages(found, kind))}\n{summary}")
    return "\n\n".join([*parts, _LEGEND, _ranks(found), _totals(found)])


def to_json(found: Inspection) -> str:
    """Returns all figures; those that are derived from others too."""
    kinds = [
        {
            "bucket": dataclasses.asdict(bucket),
            **dataclasses.asdict(kind),
            "flops": kind.flops,
            "imbalance": kind.imbalance,
        }
        for bucket, kind in zip(found.buckets, found.kinds, strict=True)
    ]
    return json.dumps(
        {
            "layers": found.layers,
            "num_params": found.num_params,
            "is_split": found.is_split,
            "smallest_limit": found.smallest_limit,
            "kinds": kinds,
        },
        indent=2,
    )


def _stages(found: Inspection, kind: KindCost) -> list[_Column]:
    stages = kind.stages
    programs = {
        "F": [stage.forward for stage in stages],
        "B": [stage.backward for stage in stages],
        "W": [stage.weight for stage in stages],
        "whole": [stage.whole for stage in stages],
    }

    def each(group: str, attribute: str, base: int) -> list[_Column]:
        return [
            (group, name, [_short(getattr(p, attribute, None), base) for p in column])
            for name, column in programs.items()
        ]

    ratios = [stage.split_ratio for stage in stages]
    saved = [stage.saved_bytes if stage.backward else None for stage in stages]
    kept = [stage.kept_bytes if stage.weight else None for stage in stages]
    return [
        ("", "stage", [str(s) for s in range(len(stages))]),
        ("", "rank", [str(stage.rank) for stage in stages]),
        ("", "layers", [_span(names) for names in found.layers]),
        ("", "params", [_short(stage.num_params) for stage in stages]),
        *each("FLOP", "flops", 1000),
        ("FLOP", "ratio", ["-" if r is None else f"{r:.3f}" for r in ratios]),
        *each("accessed, bytes", "bytes_accessed", 1024),
        *each("memory, bytes", "allocated_bytes", 1024),
        ("residuals, bytes", "of F", [_short(x, 1024) for x in saved]),
        ("residuals, bytes", "of B", [_short(x, 1024) for x in kept]),
    ]


def _ranks(found: Inspection) -> str:
    """Returns a table of the residuals that ranks hold, kind by kind."""
    columns: list[_Column] = [
        ("", "rank", [str(r) for r in range(len(found.kinds[0].ranks))])
    ]
    for bucket, kind in zip(found.buckets, found.kinds, strict=True):
        group = f"{bucket.length} tokens, {bucket.num_images} images"
        for name, attribute in (
            ("one", "one"),
            ("1F1B", "fixed_1f1b"),
            ("limit", "at_limit"),
        ):
            cells = [_short(getattr(rank, attribute), 1024) for rank in kind.ranks]
            columns.append((group, name, cells))
    pipeline = found.pipeline
    count = min(pipeline.in_flight_limit, pipeline.num_microbatches)
    how = "split" if found.is_split else "whole"
    return (
        f"Residuals by rank, bytes; backward {how}, as pipeline.hint="
        f"{pipeline.hint} has it\n{_table(columns)}\n"
        f"one: the most of one microbatch. 1F1B: peak of fixed 1F1B in a step of "
        f"{pipeline.num_microbatches} such microbatches, - where\nthe placement has no "
        f"1F1B. limit: of {count} at once (pipeline.in_flight_limit), which no hint "
        "exceeds."
    )


def _totals(found: Inspection) -> str:
    smallest = found.smallest_limit
    at = math.ceil(smallest / GIB * 1e6) / 1e6
    most = max(kind.imbalance for kind in found.kinds)
    return (
        f"{found.num_params:,} parameters (tied ones once), {len(found.layers)} stages "
        f"on {len(found.kinds[0].ranks)} ranks, largest stage / mean FLOP: {most:.3f}\n"
        f"smallest pipeline.memory_limit_gb: {at:.6f} ({_short(smallest, 1024)}B)"
    )


def _span(names: Sequence[str]) -> str:
    """Returns `vision 3: patch_embed..block_01`."""
    tower = names[0].rpartition("/")[0]
    ends = [name.removeprefix(f"{tower}/") for name in (names[0], names[-1])]
    return f"{tower} {len(names)}: {'..'.join(dict.fromkeys(ends))}".strip()


def _short(number: float | None, base: int = 1000) -> str:
    """Returns `1.23M`, with a base of 1024 `1.23Mi`, and `-` for None."""
    if number is None:
        return "-"
    units = ("", "k", "M", "G", "T", "P")
    power = 0
    while number >= 999.5 and power < len(units) - 1:
        number, power = number / base, power + 1
    digits = 0 if not power else max(0, 2 - len(str(int(number))) + 1)
    binary = f"{units[power].upper()}i" if power else ""
    return f"{number:.{digits}f}{binary if base == 1024 else units[power]}"


def _table(columns: Sequence[_Column]) -> str:
    """Aligns columns; a name of a group stands above the first of its columns."""
    blocks = []
    for group, members in itertools.groupby(columns, key=lambda column: column[0]):
        made = []
        for _, name, cells in members:
            width = max(len(name), *map(len, cells))
            pad = str.ljust if name == "layers" else str.rjust
            made.append([pad(cell, width) for cell in (name, *cells)])
        lines = [" ".join(line) for line in zip(*made, strict=True)]
        width = max(len(group), len(lines[0]))
        blocks.append([group.ljust(width), *(line.rjust(width) for line in lines)])
    rows = ("  ".join(line).rstrip() for line in zip(*blocks, strict=True))
    return "\n".join(row for row in rows if row)


if __name__ == "__main__":
    # Not on import: a process has one flag `config`, whoever defines it.
    config_flags.DEFINE_config_file("config", None, "The run to inspect.")
    flags.DEFINE_string("json", "", "Where to write all figures; nowhere by default.")
    config_border.run(main)
