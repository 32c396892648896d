"""What a letter says of a message: its name, and which parts it brings or offers."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rrfp_jax.errors import ProtocolError
from rrfp_jax.transport import codec, pieces
from rrfp_jax.transport.base import Expected, Message, Name, Tied
from rrfp_jax.transport.mail import Letter
from rrfp_jax.transport.pieces import Key


class Notice(NamedTuple):
    """What a letter says.

    Attributes:
      message: its name.
      due_s: see `Transport.send`.
      sample_ids: of its microbatch, as the sender has it.
      address: of the server that offers the parts; None if the letter brings them.
      number: of the offer.
      headers: of the parts, in the order of the letter's frames.
    """

    message: Name
    due_s: float | None
    sample_ids: tuple[int, ...]
    address: str | None
    number: int
    headers: Mapping[Key, codec.ArrayHeader]


def pack(step: int, notice: Notice) -> list[Any]:
    """Returns the body of a letter; `read` takes it apart again."""
    message, *rest, headers = notice
    is_tied = isinstance(message, Tied)
    parts = [
        (*key, codec.pack_header(header.dtype, header.shape))
        for key, header in headers.items()
    ]
    return [step, "tied" if is_tied else "task", list(message), *rest, parts]


def read(letter: Letter) -> tuple[int, Notice]:
    """Returns the step that a letter is of, and what it says.

    Raises:
      ProtocolError: it is malformed.
    """
    try:
        step, what, fields, *rest, parts = letter.body
        headers = {
            (index, box): codec.read_header(header) for index, box, header in parts
        }
        name: Name
        if what == "tied":
            name = Tied(*fields)
        else:
            source, to = fields
            name = Message(codec.read_task(source), to)
        due_s, sample_ids, address, number = rest
        if address is None and len(headers) != len(letter.frames):
            raise ValueError(f"{len(letter.frames)} frames")
        return int(step), Notice(name, due_s, sample_ids, address, number, headers)
    except (TypeError, ValueError) as error:
        raise ProtocolError(
            f"Process {letter.sender} has sent {letter.body!r}, which tells of no "
            "message. Do all processes run the same version?"
        ) from error


def check(
    headers: Mapping[Key, codec.ArrayHeader],
    wanted: Collection[Key],
    expected: Expected,
    where: str,
) -> None:
    """Checks that a letter tells of the parts that it is to tell of.

    Args:
      headers: those it tells of.
      wanted: those it is to tell of.
      expected: the whole.
      where: names the message and its sender.

    Raises:
      ProtocolError: it does not.
    """
    avals = [f"{aval.dtype.name}{list(aval.shape)}" for aval in expected.avals]
    for key, header in headers.items():
        index, box = key
        found = (
            f"{where}, has {header.dtype.name}{list(header.shape)} for array {index}"
        )
        if key not in wanted:
            raise ProtocolError(f"{found} at {box}; the whole is to be {avals}.")
        dtype, shape = expected.avals[index].dtype, pieces.shape_of(box)
        if header != (dtype, shape):
            raise ProtocolError(f"{found}; expected {dtype.name}{list(shape)}.")
    if len(headers) != len(wanted):
        raise ProtocolError(
            f"{where}, has {len(headers)} of {len(wanted)} parts; the whole is to be "
            f"{avals}."
        )
