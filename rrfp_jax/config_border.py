"""Where configs enter: a ConfigDict, loose and mutable, becomes a frozen dataclass.

`from_config_dict` checks names and types; the dataclass checks its values. Nothing
below `train/` or a command's `main` ever sees a ConfigDict. `run` is how a command
starts: whatever is wrong with its flags or config ends as one message and status 2.
"""

import dataclasses
import difflib
import enum
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import ml_collections
from absl import app, flags
from ml_collections import config_flags

from rrfp_jax.errors import ConfigError

_T = TypeVar("_T")

_USAGE = "Pass --config=FILE.py first, then any --config.KEY=VALUE."
_NAMES = {bool: "True or False", int: "an int", float: "a float", str: "a str"}


def from_config_dict(cls: type[_T], config_dict: Any, path: str = "") -> _T:
    """Returns the dataclass `cls` with the values of a ConfigDict.

    Field types may be bool, int, float, str, a StrEnum, another dataclass (from a
    nested ConfigDict), a tuple of these, and any of them `| None`. An int is taken for
    a float, a list for a tuple, the value of a StrEnum for its member; nothing else is
    converted. A key that is absent leaves the field its default.

    Args:
      cls: a dataclass.
      config_dict: a ConfigDict, or a Mapping.
      path: where it is below `--config`, such as "pipeline"; empty for the whole.

    Raises:
      ConfigError: a key is unknown or missing, a value is of the wrong type, or `cls`
        refuses it.
      TypeError: `cls` has a field of a type that is not listed above.
    """
    if not isinstance(config_dict, (Mapping, ml_collections.ConfigDict)):
        raise _wrong(path, config_dict, "a group of settings (a ConfigDict)")
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
    for key in config_dict:
        if key not in fields:
            raise _unknown_setting(_join(path, key), fields)
    for name, field in fields.items():
        if name not in config_dict and not _has_default(field):
            raise ConfigError(
                f"{_join(path, name)} is missing.\n"
                f"  Add it to the config file, or set --config.{_join(path, name)}."
            )
    expected = typing.get_type_hints(cls)
    return cls(
        **{
            name: _convert(expected[name], config_dict[name], _join(path, name))
            for name in fields
            if name in config_dict
        }
    )


def run(main: Callable[[], None]) -> NoReturn:
    """Parses the command line, runs `main`, and exits.

    The command has defined a flag `config` with `config_flags.DEFINE_config_file`.
    A ConfigError, from the flags or from `main`, is printed alone and exits with 2.
    """

    def guarded(arguments: Sequence[str]) -> None:
        try:
            _check_command(arguments)
            main()
        except ConfigError as error:
            _give_up(error)

    app.run(guarded, flags_parser=_parse_flags)
    raise AssertionError("app.run exits.")


def _parse_flags(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except (AttributeError, KeyError):  # how ml_collections refuses an unknown key
        _give_up(_explain_override(arguments))
    except flags.Error as error:
        is_value = isinstance(error, flags.IllegalFlagValueError)
        remedy = "Give that flag another value." if is_value else _USAGE
        _give_up(ConfigError(f"{_without_traceback(str(error))}\n  {remedy}"))


def _without_traceback(text: str) -> str:
    """Keeps, of a traceback through ml_collections, the place and the error."""
    head, found, traceback = text.rstrip().partition("Traceback")
    place = traceback[traceback.rfind("  File ") :]
    return (head.rstrip() + "\n" + place if found else text).replace("\n", "\n  ")


def _check_command(arguments: Sequence[str]) -> None:
    if len(arguments) > 1:
        raise ConfigError(
            f"{' '.join(arguments[1:])!r} is not a flag.\n"
            "  Write --config.KEY=VALUE to change a setting."
        )
    config = flags.FLAGS["config"].value
    if config is None:
        raise ConfigError(f"there is no config.\n  {_USAGE}")
    try:
        _ = config.items  # a file that could not be read says so only when it is used
    except OSError as error:
        text = str(error).replace("\n", "\n  ")
        raise ConfigError(f"{text}\n  {_USAGE}") from None


def _explain_override(arguments: Sequence[str]) -> ConfigError:
    """Finds the first `--config.a.b` of the command line that does not exist."""
    text = " ".join(arguments)
    file = re.search(r"--?config[= ](\S+)", text)
    config = _load(file[1]) if file else None
    for path in re.findall(r"--?(?:no)?config\.([\w.]+)", text):
        group, parent = config, ""
        for name in path.split("."):
            if not isinstance(group, ml_collections.ConfigDict):
                return ConfigError(
                    f"{path} is not a setting.\n"
                    f"  {parent or 'config'} is a value, not a group of settings."
                )
            if name not in group:
                return _unknown_setting(_join(parent, name), group)
            group, parent = group[name], _join(parent, name)
    return ConfigError(f"the settings in {text!r} cannot be read.\n  {_USAGE}")


def _load(file: str) -> Any:
    scratch = flags.FlagValues()  # type: ignore[no-untyped-call]
    argv = ["", f"--config={file}"]
    config_flags.DEFINE_config_file("config", flag_values=scratch, sys_argv=argv)
    scratch(argv)
    return scratch["config"].value


def _give_up(error: ConfigError) -> NoReturn:
    sys.stderr.write(f"ConfigError: {error}\n")
    sys.exit(2)


def _unknown_setting(path: str, known: Iterable[str]) -> ConfigError:
    """Returns the error for a setting that does not exist.

    Args:
      path: of the setting, below `--config`.
      known: the names that exist in its place.
    """
    known = list(known)
    group, _, name = path.rpartition(".")
    close = difflib.get_close_matches(name, known, n=1)
    guess = f"Did you mean --config.{_join(group, close[0])}? " if close else ""
    return ConfigError(
        f"{path} is not a setting.\n"
        f"  {guess}Settings of config{'.' * bool(group)}{group}: {', '.join(known)}."
    )


def _convert(expected: Any, value: Any, path: str) -> Any:
    if typing.get_origin(expected) in (typing.Union, types.UnionType):
        return None if value is None else _convert(_inner(expected), value, path)
    if typing.get_origin(expected) is tuple:
        return _convert_tuple(expected, value, path)
    if dataclasses.is_dataclass(expected):
        return from_config_dict(typing.cast(type, expected), value, path)
    if isinstance(expected, type) and issubclass(expected, enum.StrEnum):
        if value not in list(expected):
            why = "is unknown" if isinstance(value, str) else ""
            raise _wrong(path, value, _describe(expected), why)
        return expected(value)
    if expected not in _NAMES:
        raise TypeError(f"{path} is declared {expected}, which no config can give.")
    if expected is float and type(value) is int:
        return float(value)
    # bool is an int to Python, but not to a reader of the config.
    if not isinstance(value, expected) or isinstance(value, bool) != (expected is bool):
        raise _wrong(path, value, _describe(expected))
    return value


def _convert_tuple(expected: Any, value: Any, path: str) -> tuple[Any, ...]:
    entries = typing.get_args(expected)
    if not isinstance(value, (tuple, list)):
        raise _wrong(path, value, _describe(expected))
    if entries[-1] is Ellipsis:
        entries = (entries[0],) * len(value)
    if len(value) != len(entries):
        why = f"has {len(value)} entries, not {len(entries)}"
        raise _wrong(path, value, _describe(expected), why)
    return tuple(
        _convert(entry, each, f"{path}[{i}]")
        for i, (entry, each) in enumerate(zip(entries, value, strict=True))
    )


def _inner(optional: Any) -> Any:
    """Returns X of `X | None`."""
    rest = [arg for arg in typing.get_args(optional) if arg is not types.NoneType]
    if len(rest) != 1:
        raise TypeError(f"{optional} is not of the form X | None.")
    return rest[0]


def _describe(expected: Any) -> str:
    if typing.get_origin(expected) is tuple:
        entries = typing.get_args(expected)
        if entries[-1] is Ellipsis:
            return f"a tuple, each entry {_describe(entries[0])}"
        return f"a tuple of ({', '.join(map(_describe, entries))})"
    if isinstance(expected, type) and issubclass(expected, enum.StrEnum):
        return f"one of {', '.join(expected)}"
    return _NAMES.get(expected, str(expected))


def _wrong(path: str, value: Any, wanted: str, why: str = "") -> ConfigError:
    why = why or f"is of type {type(value).__name__}"
    flag, *entry = f"--{_join('config', path)}".split("[", 1)
    remedy = f"Make that entry of {flag}" if entry else f"Set {flag} to"
    return ConfigError(f"{path or 'config'}={value!r} {why}.\n  {remedy} {wanted}.")


def _has_default(field: "dataclasses.Field[Any]") -> bool:
    return (
        field.default is not dataclasses.MISSING
        or field.default_factory is not dataclasses.MISSING
    )


def _join(group: str, name: str) -> str:
    return f"{group}.{name}" if group and name else group or name
