r"""Image-text conversations in LLaVA's JSON format (arXiv:2304.08485).

    [{"id": "7", "image": "a.jpg" | ["a.jpg", "b.jpg"] | absent,
      "conversations": [{"from": "human", "value": "<image>\nWhat is it?"},
                        {"from": "gpt", "value": "A cat."}]}, ...]

or the same records as JSON lines. Only the "gpt" turns are learned.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from rrfp_jax import errors
from rrfp_jax.data import config as config_lib
from rrfp_jax.data import image_files, text_files
from rrfp_jax.data import sample as sample_lib
from rrfp_jax.data import tokenizer as tokenizer_lib


@dataclasses.dataclass(frozen=True)
class Record:
    """One checked record: its conversation, and the paths of its images in order."""

    origin: str
    turns: tuple[sample_lib.Turn, ...]
    images: tuple[str, ...]


class LlavaSource:
    """The user's conversations; records are checked at once, images when read.

    Args:
      config: with `image_folder` and the image format.
      tokenizer: of the text.
      field: "paths" or "eval_paths", the field of `config` that names the files.

    Raises:
      ConfigError: at the first bad file or record. `__getitem__` raises it for an
        image that is missing or unreadable.
    """

    def __init__(
        self,
        config: config_lib.DataConfig,
        tokenizer: tokenizer_lib.Tokenizer,
        field: str,
    ) -> None:
        patterns: tuple[str, ...] = getattr(config, field)
        paths = text_files.expand_paths(patterns, field)
        self._records = [record for path in paths for record in _read_file(path, field)]
        self._config = config
        self._tokenizer = tokenizer
        if not self._records:
            raise errors.ConfigError(
                f"data.{field}={patterns} has no records.\n"
                f"  Correct --config.data.{field}."
            )
        self.image_counts: Sequence[int] = [len(r.images) for r in self._records]
        self._folder = pathlib.Path(config.image_folder)
        if any(self.image_counts) and not self._folder.is_dir():
            raise errors.ConfigError(
                f"data.image_folder={config.image_folder!r} is not a folder.\n"
                "  Set --config.data.image_folder to the folder of the images."
            )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> sample_lib.Sample:
        record = self._records[index]
        config = self._config
        images_HWC = [
            image_files.load_image(
                self._folder / name, config.image_size, config.channels, record.origin
            )
            for name in record.images
        ]
        return sample_lib.encode_turns(
            record.turns,
            images_HWC,
            self._tokenizer,
            config.tokens_per_image,
            sample_id=index,
            origin=record.origin,
        )


def _read_file(path: pathlib.Path, field: str) -> Iterator[Record]:
    """Yields the records of a JSON array, or of JSON lines."""
    data = path.read_bytes()
    if data.lstrip().startswith(b"["):
        records = _parse_json(data, str(path), field)
        for number, record in enumerate(records, start=1):
            yield _check_record(record, f"{path}, record {number}", field)
        return
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            yield _check_record(_parse_json(line, where, field), where, field)


def _parse_json(data: bytes, where: str, field: str) -> Any:
    try:
        return json.loads(data)
    except ValueError as error:  # Says the line and column within `data`.
        raise _bad(where, f"is not JSON: {error}", field) from error


def _check_record(record: Any, where: str, field: str) -> Record:
    """Returns the record, or raises with what it lacks."""
    if not isinstance(record, dict):
        raise _bad(where, f"is a {type(record).__name__}, not an object", field)
    if "id" in record:
        where = f"{where} (id={record['id']!r})"
    conversations = record.get("conversations")
    if not isinstance(conversations, list) or not conversations:
        keys = sorted(record)
        raise _bad(where, f'has no list "conversations"; it has {keys}', field)
    turns = tuple(
        turn
        for number, message in enumerate(conversations, start=1)
        for turn in _check_message(message, f"{where}, turn {number}", field)
    )
    if not turns[-1].is_answer:
        raise _bad(where, 'does not end with a "gpt" turn', field)
    images = record.get("image") or []
    if isinstance(images, str):
        images = [images]
    if not isinstance(images, list) or not all(isinstance(i, str) for i in images):
        raise _bad(where, f'has "image": {images!r}, not one or several paths', field)
    num_placeholders = sum(
        turn.text.count(sample_lib.IMAGE_PLACEHOLDER) for turn in turns
    )
    if num_placeholders != len(images):
        raise _bad(
            where,
            f"has {num_placeholders} {sample_lib.IMAGE_PLACEHOLDER} placeholders and "
            f"{len(images)} images",
            field,
        )
    return Record(where, turns, tuple(images))


def _check_message(message: Any, where: str, field: str) -> list[sample_lib.Turn]:
    """Returns what to write for one message, in the words of LLaVA's "v1" prompt."""
    speaker, value = None, None
    if isinstance(message, dict):
        speaker, value = message.get("from"), message.get("value")
    if not isinstance(value, str):
        raise _bad(where, 'has no string under "value"', field)
    match speaker:
        case "system":
            return [sample_lib.Turn(f"{value}\n", is_answer=False)]
        case "human":
            return [sample_lib.Turn(f"USER: {value}\n", is_answer=False)]
        case "gpt":
            return [
                sample_lib.Turn("ASSISTANT:", is_answer=False),
                sample_lib.Turn(f" {value}", is_answer=True),
            ]
        case _:
            raise _bad(where, f'has "from": {speaker!r}, not human or gpt', field)


def _bad(where: str, what: str, field: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"{where} {what}.\n"
        f"  Correct it, or leave the file out of --config.data.{field}."
    )
