"""Reads traces of a real run, and says which settings would make its steps faster.

    python -m rrfp_jax.advise --trace=runs/mm --memory_gb=40

DIR is a work directory, its `traces/`, or any folder with `*.trace.json`; more traced
steps (`train.num_traced`) make better predictions. The traced microbatches are put
together to steps anew, and on these hints, placements, limits and launch-ahead are
simulated, with the latency that the host had. Prints the predicted step times and the
flags of the best; writes all to `advice.csv` and `advice.png` in the work directory
(the parent of `traces/`, or DIR), or `--out`. `--memory_gb` is what residuals may take
on each device. A step is the pipeline's part of one: without loading data and the
optimizer.

`--config.hints`, `.limits`, `.launch_ahead` and `.weight_fraction` change what is
tried; `rrfp_jax.sim.fit_candidates.Search` says what they mean.
"""

import dataclasses
import pathlib
import re
import sys

import ml_collections
from absl import flags
from ml_collections import config_flags

from rrfp_jax import advise_report, config_border
from rrfp_jax.core import trace as trace_lib
from rrfp_jax.core.trace import Trace
from rrfp_jax.errors import ConfigError
from rrfp_jax.observe.progress import progress
from rrfp_jax.sim import fit, fit_candidates, fit_draws
from rrfp_jax.sim.fit import Fit
from rrfp_jax.sim.fit_candidates import Candidate, Prediction, Search
from rrfp_jax.sim.fit_draws import Settings

LeftOut = dict[str, list[str]]  # why -> the candidates that are not there


def read(folder: pathlib.Path) -> dict[str, Trace]:
    """Returns the traces in a work directory, or in a folder, by file name.

    Raises:
      ConfigError: there is none, or a file is none.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"--trace={folder} is not a folder.\n"
            "  Pass a work directory with traces/, or a folder with *.trace.json."
        )
    inside = folder / "traces"
    where = inside if inside.is_dir() else folder
    paths = sorted(where.glob("*.trace.json"))
    if not paths:
        raise ConfigError(
            f"{where} has no *.trace.json.\n"
            "  Train with --config.train.trace_step=STEP to write one."
        )
    return {path.name: _read_one(path) for path in paths}


def _read_one(path: pathlib.Path) -> Trace:
    try:
        trace = trace_lib.from_json(path.read_text())
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{path} is not a trace ({error!r}).\n"
            "  Remove it, or write it again with --config.train.trace_step=STEP."
        ) from error
    for what, start_s, end_s in (
        *((span.task, span.start_s, span.end_s) for span in trace.spans),
        *((move.source, move.start_s, move.end_s) for move in trace.transfers),
    ):
        if not start_s <= end_s:
            raise ConfigError(
                f"{path} is not a trace: {what} ends before it begins "
                f"({start_s} s to {end_s} s).\n  Remove it."
            )
    return trace


def compare(
    fitted: Fit, chosen: list[Candidate], settings: Settings
) -> tuple[list[Prediction], LeftOut]:
    """Predicts every candidate on the same steps.

    Returns:
      Predictions, the fastest first, without those that a lower limit makes as well;
      and which candidates do not fit.

    Raises:
      ConfigError: none is left.
    """
    drawn = fit_draws.draws(fitted, settings)
    found: list[Prediction] = []
    left_out: LeftOut = {}
    with progress(len(chosen), "simulate", "candidate") as bar:
        for candidate in chosen:
            try:
                found.append(fit_candidates.predict(candidate, drawn))
            except ConfigError as error:
                left_out.setdefault(str(error), []).append(candidate.name)
            bar.advance()
    if not found:
        first = next(iter(left_out))
        raise ConfigError(f"none of {len(chosen)} candidates can run here. {first}")
    distinct = fit_candidates.distinct(found)
    return sorted(distinct, key=lambda p: p.mean_s), left_out


def check_memory(memory_gb: float, fitted: Fit) -> None:
    """Refuses a limit that is none, or that cannot be kept.

    Raises:
      ConfigError: it is negative, or the traces do not say what tasks keep.
    """
    if not memory_gb >= 0:
        raise ConfigError(
            f"--memory_gb={memory_gb} is negative.\n"
            "  Give the GiB of residuals that a device may hold, or 0 for any number."
        )
    if memory_gb and not fitted.knows_residuals:
        raise ConfigError(
            f"--memory_gb={memory_gb:g} needs to know what tasks keep, and these "
            "traces do not say it.\n  Pass --memory_gb=0, or trace the run again."
        )


def main() -> None:
    """Advises on what the flags say."""
    given = flags.FLAGS
    search = config_border.from_config_dict(Search, given.config)
    if not given.trace:
        raise ConfigError("there is no trace.\n  Pass --trace=DIR, a work directory.")
    folder = pathlib.Path(given.trace)
    fitted = fit.fit(read(folder))
    check_memory(given.memory_gb, fitted)
    settings = Settings(given.num_draws, given.seed, search.weight_fraction)
    chosen = fit_candidates.candidates(fitted, search, given.memory_gb)
    found, left_out = compare(fitted, chosen, settings)
    out = pathlib.Path(given.out or _work_directory(folder))
    out.mkdir(parents=True, exist_ok=True)
    (out / "advice.csv").write_text(advise_report.to_csv(found))
    advise_report.draw(found, fitted, out / "advice.png")
    print(advise_report.to_text(fitted, found, left_out, settings))
    print(f"\nWrote advice.csv and advice.png to {out}.")


def _work_directory(folder: pathlib.Path) -> pathlib.Path:
    return folder.absolute().parent if folder.absolute().name == "traces" else folder


def _define_flags() -> None:
    """Defines the flags; a process has one flag `config`, so not on import."""
    known = dataclasses.asdict(Search())
    try:
        # It reads the command line at once, to know which settings are to be flags.
        config_flags.DEFINE_config_dict("config", ml_collections.ConfigDict(known))
    except AttributeError as error:
        (name, *_) = re.findall(r"\w+", str(error))
        sys.stderr.write(
            f"ConfigError: {name} is not a setting.\n"
            f"  Settings of config: {', '.join(known)}.\n"
        )
        sys.exit(2)
    flags.DEFINE_string("trace", "", "Work directory, or folder of traces.")
    flags.DEFINE_float("memory_gb", 0.0, "Residuals on each device, GiB; 0 for any.")
    flags.DEFINE_integer("num_draws", 20, "Steps to simulate.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the choice of microbatches.")
    flags.DEFINE_string("out", "", "Where to write; the work directory by default.")


if __name__ == "__main__":
    _define_flags()
    config_border.run(main)
