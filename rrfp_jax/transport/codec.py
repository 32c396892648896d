"""What travels between processes, as bytes: envelopes, tasks and the shapes of arrays.

msgpack only, never pickle: what a peer sends is data, and can run nothing. Whatever is
read here may be anybody's, so each reader checks all of it and says with values what is
wrong. Arrays are tuples after the journey, lists too.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import msgpack
import numpy as np

from rrfp_jax.core.task import Kind, Task
from rrfp_jax.errors import ProtocolError

VERSION = 1
"""Of the envelope and of every body; a change of either is a new version."""

_LONGEST_FOUND = 100  # characters of what a peer sent that a message repeats


class RefusedLetter(ProtocolError):
    """A letter that is not to be read.

    `reason` is the same for all letters of its fault, so that it can be logged once;
    the message adds what was found.
    """

    def __init__(self, reason: str, found: object) -> None:
        text = repr(found)
        if len(text) > _LONGEST_FOUND:
            text = f"{text[:_LONGEST_FOUND]}..."
        super().__init__(f"{reason}: {text}")
        self.reason = reason


class Envelope(NamedTuple):
    """What every letter carries, but for its frames and its sender."""

    run_id: str
    is_bulk: bool  # which of the two channels it took
    number: int  # of the letters of its sender in this channel, from 0
    kind: str
    body: Any
    sizes: tuple[int, ...]  # of its frames, in bytes


def pack(envelope: Envelope) -> bytes:
    """Returns an envelope as bytes.

    Raises:
      TypeError: the body holds what does not travel. None, numbers, strings, bytes,
        sequences and mappings of them do; a `Task` does, as a sequence.
    """
    packed: bytes = msgpack.packb((VERSION, *envelope))
    return packed


def unpack(data: bytes | memoryview) -> Envelope:
    """Reads an envelope.

    Raises:
      RefusedLetter: it is none, or is one of another version.
    """
    try:
        found = msgpack.unpackb(data, use_list=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RefusedLetter("it is not msgpack", str(error)) from error
    match found:
        case (int(version), *_) if version != VERSION:
            raise RefusedLetter(f"its version is not {VERSION}", version)
        case (int(), str(run_id), bool(is_bulk), int(number), str(kind), body, sizes):
            if isinstance(sizes, tuple) and all(map(_is_size, sizes)):
                return Envelope(run_id, is_bulk, number, kind, body, sizes)
    raise RefusedLetter("it has no envelope", found)


def read_task(value: Any) -> Task:
    """Reads a task from `(kind, stage, microbatch)`, as which one travels.

    Raises:
      ProtocolError: it is none.
    """
    match value:
        case ("F" | "B" | "W" as kind, stage, microbatch):
            if _is_size(stage) and _is_size(microbatch):
                return Task(Kind(kind), stage, microbatch)
    raise ProtocolError(
        f"A peer sent {value!r} for a task; expected (kind, stage, microbatch), such "
        "as ('F', 2, 0)."
    )


class ArrayHeader(NamedTuple):
    """What the bytes of an array mean. Travels as `(dtype's name, shape)`."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]


def pack_header(dtype: Any, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Returns an array's header as a body that travels.

    Raises:
      TypeError: arrays of this dtype do not travel: objects, strings, records.
    """
    name = np.dtype(dtype).name
    if _dtype_of(name) != np.dtype(dtype):
        raise TypeError(f"An array of dtype {dtype} cannot be sent; send numbers.")
    return name, tuple(map(int, shape))


def read_header(value: Any) -> ArrayHeader:
    """Reads an array's header.

    Raises:
      ProtocolError: it is none.
    """
    match value:
        case (str(name), tuple(shape)) if all(map(_is_size, shape)):
            if (dtype := _dtype_of(name)) is not None:
                return ArrayHeader(dtype, shape)
    raise ProtocolError(
        f"A peer sent {value!r} for an array's header; expected (dtype, shape), such "
        "as ('bfloat16', (4, 16))."
    )


def read_array(header: ArrayHeader, data: memoryview) -> np.ndarray[Any, Any]:
    """Returns bytes as the array that they are. Copies nothing.

    Raises:
      ProtocolError: they are too few or too many.
    """
    expected = math.prod(header.shape) * header.dtype.itemsize
    if data.nbytes != expected:
        raise ProtocolError(
            f"A peer sent {data.nbytes} bytes for {header.dtype} of shape "
            f"{header.shape}; expected {expected}."
        )
    return np.frombuffer(data, np.uint8).view(header.dtype).reshape(header.shape)


def _dtype_of(name: str) -> np.dtype[Any] | None:
    """Returns the dtype of numbers so named, NumPy's or ml_dtypes', or None."""
    extra = getattr(ml_dtypes, name, None)
    try:
        dtype = np.dtype(extra if isinstance(extra, type) else name)
    except TypeError:
        return None
    is_number = dtype.kind in "biufc" or isinstance(extra, type)
    return dtype if is_number and dtype.name == name else None


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
