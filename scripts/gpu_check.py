"""Checks on a GPU, in under five minutes, what a CPU cannot show.

    python scripts/gpu_check.py [--mode=auto|cpu|gpu] [--size=full|tiny] [--json FILE]
        [--budget_s=300] [--checks host copies pulls layer orders gradients processes]

* gradients: a language and a vision-language model on 4 pipeline ranks, with BF, BFW
  and in a deterministic order, in float32 and bfloat16, against one process;
* layer: FLOPs and time of F, B, W and the whole backward of a Qwen3-1.7B block;
* host: what the host needs for a task, beside a plain loop of the same executables,
  and what polling costs;
* orders: BF, BFW and fixed 1F1B of a language model on 4 ranks;
* copies, pulls, processes: bandwidth of `device_put` and of the transfer library,
  within a process and between two.

One GPU is enough: the ranks share it, and so do the processes. It runs the ranks'
programs one after another, so the orders show equal gradients and their overhead, and
no speed-up. Without a GPU the same checks run on the CPU, with sizes cut down; the
first lines say which. Two processes on one device measure the transfer library, no
link.

Ends with status 1 if a figure is over its limit or a check fails, and with 2 if it
cannot begin.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Sequence

# The parts are imported as the tests import them.
sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import tqdm

from rrfp_jax.errors import ConfigError
from scripts.gpu import figures, processes, sizes
from scripts.gpu.figures import Failure, Row
from scripts.gpu.processes import CHECKS, Machine
from scripts.gpu.sizes import Size

MODES, SIZES = ("auto", "cpu", "gpu"), ("full", "tiny")
_LOOK_S = 60.0  # until a machine has answered


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the checks; returns the status to exit with."""
    flags = _parser().parse_args(arguments)
    try:
        size, machine = prepare(flags.mode, flags.size)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return 2
    print(f"{machine}\n{size.name} sizes:\n{size}")
    print(
        "One device runs the ranks' programs one after another: no speed-up is shown."
    )
    print(f"\n{figures.heading()}", flush=True)
    began_s = time.monotonic()
    rows = run(size, flags.checks, flags.budget_s)
    taken_s = time.monotonic() - began_s
    verdict = "PASS" if figures.has_passed(rows) else "FAIL"
    print(f"\n{verdict}, {taken_s:.0f} s")
    if flags.json:
        found = {
            **{f"machine_{k}": v for k, v in dataclasses.asdict(machine).items()},
            "size": size.name,
            **figures.flat(rows),
            "seconds": taken_s,
        }
        flags.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if verdict == "PASS" else 1


def prepare(mode: str, size: str) -> tuple[Size, Machine]:
    """Returns the sizes for what the machine has, and the machine.

    Sets what the checks' processes must find in their environment.

    Raises:
      ConfigError: there is no GPU where one is asked for, or it is too small.
    """
    if mode == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
    # Several processes share the device.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    machine = processes.machine(_LOOK_S)
    if isinstance(machine, Failure):
        raise ConfigError(
            f"JAX does not start: {machine.reason}.\n"
            "  Mend its installation, or give --mode=cpu."
        )
    return chosen(mode, size, machine), machine


def chosen(mode: str, size: str, machine: Machine) -> Size:
    """Returns the sizes for a machine.

    Raises:
      ConfigError: there is no GPU where one is asked for, or it is too small.
    """
    if mode == "gpu" and machine.backend != "gpu":
        platforms = os.environ.get("JAX_PLATFORMS", "")
        raise ConfigError(
            f"--mode=gpu, but JAX sees {machine} (JAX_PLATFORMS={platforms!r}).\n"
            "  Install '.[cuda12]' or '.[cuda13]' on a machine with a GPU, or give "
            "--mode=cpu."
        )
    if size == "tiny":
        return sizes.TINY
    if machine.backend != "gpu":
        return sizes.CPU
    if machine.memory_gib is not None and machine.memory_gib < sizes.GPU.memory_gib:
        raise ConfigError(
            f"the checks need {sizes.GPU.memory_gib} GiB on the device; of this "
            f"{machine.kind} JAX may have {machine.memory_gib:.1f} GiB.\n"
            "  Raise XLA_PYTHON_CLIENT_MEM_FRACTION, take a larger one, or give "
            "--size=tiny."
        )
    return sizes.GPU


def run(size: Size, checks: Sequence[str], budget_s: float) -> list[Row]:
    """Runs checks and prints each row as it comes.

    Args:
      size: of them.
      checks: their names.
      budget_s: for all checks there are; each has its share, and what was saved.
    """
    rows: list[Row] = []
    saved_s = 0.0
    with tqdm.tqdm(checks, unit="check", leave=False, disable=None) as bar:
        for check in bar:
            limit_s = saved_s + budget_s * CHECKS[check][2]
            began_s = time.monotonic()
            for found in processes.checked(check, size, limit_s):
                if isinstance(found, str):
                    bar.set_description(f"{check}: {found}")
                    continue
                rows.append(Row(check, found))
                tqdm.tqdm.write(str(rows[-1]))
                sys.stdout.flush()
            saved_s = limit_s - (time.monotonic() - began_s)
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", choices=MODES, default="auto")
    parser.add_argument("--size", choices=SIZES, default="full")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--budget_s", type=float, default=300.0)
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=list(CHECKS))
    return parser


if __name__ == "__main__":
    sys.exit(main())
