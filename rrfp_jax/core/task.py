"""Tasks and their `2F0` notation: stage, kind, microbatch.

The notation is that of PyTorch's schedules (torch.distributed.pipelining), and this
module is its only home.
"""

import enum
import re
from typing import NamedTuple

from rrfp_jax.errors import ConfigError


class Kind(enum.StrEnum):
    """What a task computes."""

    F = "F"  # forward
    B = "B"  # backward: of the input only where the backward is split, else all of it
    W = "W"  # weight gradient, where the backward is split

    # A str's own hash runs in C; Enum's is a Python function, and tasks are hashed
    # several times per event.
    __hash__ = str.__hash__


class Task(NamedTuple):
    """One launch: `kind` of `stage` for `microbatch`. Prints as `2F0`."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


_PATTERN = re.compile(r"(\d+)([FBW])(\d+)")


def parse(text: str) -> Task:
    """Reads a task from its notation, `"2F0"`.

    Raises:
      ConfigError: `text` is not stage, F or B, microbatch.
    """
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise ConfigError(
            f"{text.strip()!r} is not a task.\n"
            "  Write stage, kind (F, B or W) and microbatch, such as 2F0."
        )
    return Task(Kind(match[2]), int(match[1]), int(match[3]))
