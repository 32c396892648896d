"""Draws recorded steps as one HTML page to look into, on one time axis.

    python -m rrfp_jax.timeline RUN/traces/STEP.trace.json [...] --out=FILE.html

A run writes the traces of `train.num_traced` steps from `train.trace_step` on;
`core.trace.to_json` writes any other. Traces of different pipelines, or of a simulation
and a run, may be compared. The page needs nothing but a browser; see
`observe.html_timeline`.
"""

import math
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import app, flags

from rrfp_jax.core import trace as trace_lib
from rrfp_jax.core.memory import GIB
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.observe import html_timeline

_OUT = flags.DEFINE_string("out", "timeline.html", "The page to write.")
_LIMIT = flags.DEFINE_float(
    "memory_limit_gb", 0.0, "The limit on a rank's residuals, to be drawn; 0 for none."
)

_WHICH = "Pass the traces/step_*.trace.json that a run has written, one or several."


def main(paths: Sequence[str]) -> None:
    """Draws what the flags say.

    Args:
      paths: of the traces, the uppermost first.

    Raises:
      ConfigError: a flag or a file is not what it should be.
    """
    out, limit_gb = pathlib.Path(_OUT.value), _LIMIT.value
    if not paths:
        raise ConfigError(f"there is no trace.\n  {_WHICH}")
    if not (0 <= limit_gb < math.inf):
        raise ConfigError(
            f"--memory_limit_gb={limit_gb} is no limit.\n"
            "  Set it to the run's pipeline.memory_limit_gb, or 0 for none."
        )
    if out.suffix != ".html":
        raise ConfigError(
            f"--out={out} is not the name of a page.\n  Let it end in .html."
        )
    if not out.absolute().parent.is_dir():
        raise ConfigError(
            f"--out={out} is in a folder that does not exist.\n"
            "  Make the folder, or pass another --out."
        )
    panels = [(path, read(path)) for path in paths]
    html_timeline.draw(panels, out, round(limit_gb * GIB))
    print(f"Wrote {out}.")


def read(path: str) -> Trace:
    """Returns the trace in a file.

    Raises:
      ConfigError: there is no such file, it holds no trace, or one of a part of the
        pipeline only.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.\n  {_WHICH}") from None
    try:
        trace = trace_lib.from_json(text)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not a trace: {type(error).__name__}: {error}.\n  {_WHICH}"
        ) from None
    missing = set(trace.graph.tasks()) - {span.task for span in trace.spans}
    if missing:
        raise ConfigError(
            f"{path} lacks {len(missing)} tasks of its step, such as {min(missing)}.\n"
            "  Of several processes, only the first records what all have done: pass "
            "its trace."
        )
    return trace


def _run(arguments: Sequence[str]) -> None:
    try:
        main(arguments[1:])
    except ConfigError as error:
        _give_up(error)


def _parse(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        _give_up(ConfigError(f"{error}\n  --help lists the flags."))


def _give_up(error: ConfigError) -> NoReturn:
    sys.stderr.write(f"ConfigError: {error}\n")
    sys.exit(2)


if __name__ == "__main__":
    app.run(_run, flags_parser=_parse)
