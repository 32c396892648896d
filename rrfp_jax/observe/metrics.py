"""The figures of a training run, step by step: a JSON line each, and TensorBoard.

`metrics.jsonl` is the record: one object a line, flushed line by line, so that a run
that dies leaves every step it finished. TensorBoard shows the same figures.
"""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self, SupportsFloat

import tensorboardX

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Appends the scalars of steps to a work directory. One writer a directory.

    A resumed run calls `rewind` with the step of its checkpoint before it writes: what
    the earlier run wrote after that step will be written again.

    Attributes:
      path: of the JSON lines.
    """

    def __init__(self, workdir: str | pathlib.Path) -> None:
        """Opens, and where needed makes, the directory; changes nothing in it yet."""
        folder = pathlib.Path(workdir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE_NAME
        self._board_folder = folder / "tensorboard"
        self._board: Any = None  # opened by the first write, after any rewind
        self._purge_step: int | None = None
        _drop_torn_line(self.path)
        self._file = self.path.open("a")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.close()

    def write(self, step: int, scalars: Mapping[str, SupportsFloat]) -> None:
        """Appends one line, `{"step": step, name: value, ...}`.

        Integers stay integers. JSON has no NaN and no infinity: a value that is not
        finite is written as null. TensorBoard is given it as it is.

        Raises:
          ValueError: a scalar is called "step".
        """
        if "step" in scalars:
            raise ValueError("a scalar cannot be called 'step', which every line has.")
        line = {name: _to_json(value) for name, value in scalars.items()}
        self._file.write(json.dumps({"step": step, **line}, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is None:
            self._board = tensorboardX.SummaryWriter(
                str(self._board_folder), purge_step=self._purge_step
            )
        for name, value in scalars.items():
            self._board.add_scalar(name, float(value), step)

    def has(self, step: int, name: str) -> bool:
        """Whether a line of `step` holds the scalar `name`."""
        lines = map(json.loads, self.path.read_text().splitlines())
        return any(line["step"] == step and name in line for line in lines)

    def rewind(self, step: int) -> None:
        """Drops every line after `step`, at once or not at all.

        TensorBoard keeps its files and hides the steps that are dropped here.
        """
        self.close()
        lines = self.path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        scratch = self.path.with_suffix(".tmp")
        with scratch.open("w") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self.path)
        self._file = self.path.open("a")
        self._purge_step = step + 1

    def close(self) -> None:
        """Flushes and closes both; harmless when done twice."""
        self._file.close()
        if self._board is not None:
            self._board.close()
            self._board = None


def _drop_torn_line(path: pathlib.Path) -> None:
    """Cuts off what a process that was killed in mid-line left."""
    if not path.exists():
        return
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def _to_json(value: SupportsFloat) -> int | float | None:
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
