"""Plain text: the running Python's standard library, and the user's JSON lines.

Only reading; `packed` makes samples of the documents.
"""

import glob
import json
import pathlib
import sysconfig
import zlib
from collections.abc import Iterator

import tqdm

from rrfp_jax import errors
from rrfp_jax.data import config as config_lib

_SKIPPED_FOLDERS = frozenset(
    {
        # Not the library's own code:
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "idle_test",
        "lib2to3",
        "turtledemo",
        "__pycache__",
        # Generated tables and manuals:
        "encodings",
        "pydoc_data",
    }
)
_HELD_OUT_ONE_IN = 10


def stdlib_documents(
    split: config_lib.Split, root: pathlib.Path | None = None
) -> Iterator[bytes]:
    """Yields the source files of one split, ordered by path.

    One file in ten is held out, by a hash of its path relative to `root`, so a split
    is the same wherever the same Python version is installed.

    Args:
      split: which files.
      root: folder to read; by default the standard library's.

    Raises:
      ConfigError: when the split has no files.
    """
    root = root or pathlib.Path(sysconfig.get_paths()["stdlib"])
    is_held_out = split is config_lib.Split.EVAL
    found = False
    for path in sorted(root.rglob("*.py"), key=lambda path: path.as_posix()):
        name = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(name.parts):
            continue
        residue = zlib.crc32(name.as_posix().encode()) % _HELD_OUT_ONE_IN
        if (residue == 0) == is_held_out:
            found = True
            yield path.read_bytes()
    if not found:
        raise errors.ConfigError(
            f"data.source=stdlib found no *.py files for {split} in {root}; this "
            "Python was installed without its sources.\n"
            "  Set --config.data.source to digits, jsonl or llava."
        )


def expand_paths(patterns: tuple[str, ...], field: str) -> list[pathlib.Path]:
    """Returns the files of all patterns: as listed, sorted within a glob.

    Args:
      patterns: files or globs (`**` descends).
      field: of `DataConfig`, for messages.

    Raises:
      ConfigError: when a pattern matches no file.
    """
    paths: list[pathlib.Path] = []
    for pattern in patterns:
        matches = sorted(glob.glob(pattern, recursive=True))
        files = [path for path in map(pathlib.Path, matches) if path.is_file()]
        if not files:
            raise errors.ConfigError(
                f"data.{field}: {pattern!r} matches no file.\n"
                f"  Correct it in --config.data.{field}."
            )
        paths += files
    return paths


def jsonl_documents(
    patterns: tuple[str, ...], field: str, progress: bool
) -> Iterator[str]:
    """Yields the "text" of each line of the user's files; blank lines are skipped.

    Args:
      patterns: files or globs.
      field: of `DataConfig`, for messages.
      progress: whether to show a progress bar, in bytes read.

    Raises:
      ConfigError: at the first file or line that is not as it should be.
    """
    paths = expand_paths(patterns, field)
    num_bytes = sum(path.stat().st_size for path in paths)
    with tqdm.tqdm(
        total=num_bytes,
        desc=f"reading data.{field}",
        unit="B",
        unit_scale=True,
        disable=None if progress else True,
    ) as bar:
        for path in paths:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    bar.update(len(line))
                    if line.strip():
                        yield _parse_line(line, f"{path}:{number}", field)


def _parse_line(line: bytes, where: str, field: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise errors.ConfigError(
            f"{where} is not JSON: {error}.\n"
            f"  Correct the line, or leave the file out of --config.data.{field}."
        ) from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        keys = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise errors.ConfigError(
            f'{where} has no string under "text"; it has {keys}.\n'
            f"  Correct the line, or leave the file out of --config.data.{field}."
        )
    return text
