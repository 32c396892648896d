"""The errors of rrfp_jax, and whose fault each of them is.

Every message says what is wrong, with values, and then what to change. This module
imports nothing of the project, so every layer may raise these.
"""

from collections.abc import Collection


class ConfigError(ValueError):
    """The user can fix it: a wrong config, data file or machine.

    Raised before anything is compiled; `rrfp_jax.main` prints it alone, without a
    traceback, and exits with status 2.
    """


class ProtocolError(RuntimeError):
    """A peer sent what it must not: a duplicate, a foreign message, a wrong shape."""


class StallError(RuntimeError):
    """Tasks remain and none can become ready; the message says who waits for what."""


class PeerLost(RuntimeError):
    """A process of the run is silent: killed, frozen, cut off. The message names it."""


class RemoteError(RuntimeError):
    """A process of the run failed; the message says which one, and how."""


class InvariantError(AssertionError):
    """A bug in rrfp_jax; the message carries the story of the task concerned."""


def check_choice(path: str, value: str, choices: Collection[str]) -> None:
    """Refuses a setting that is none of its choices.

    Args:
      path: of the setting, below `--config`.
      value: what it is set to.
      choices: what it may be; the last may describe further ones.

    Raises:
      ConfigError: `value` is none of `choices`.
    """
    if value not in choices:
        raise ConfigError(
            f"{path}={value!r} is not known.\n"
            f"  Set --config.{path} to one of {', '.join(choices)}."
        )


def check_at_least(group: str, config: object, **smallest: float) -> None:
    """Refuses settings that are too small.

    Args:
      group: of the settings, below `--config`.
      config: has them as attributes.
      **smallest: by name, what each may be at least.

    Raises:
      ConfigError: one is less.
    """
    for name, least in smallest.items():
        if getattr(config, name) < least:
            raise ConfigError(
                f"{group}.{name}={getattr(config, name)} is less than {least}.\n"
                f"  Set --config.{group}.{name} to {least} or more."
            )
