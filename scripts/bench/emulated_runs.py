"""Starts the processes of an emulated pipeline, for benchmarks that need several."""

import json
import pathlib
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from scripts import launch_local

_WORKER = pathlib.Path(__file__).with_name("emulated_worker.py")


def run(num_processes: int, **job: Any) -> list[list[dict[str, Any]]]:
    """Returns, for each run of the job, what each process saw of it.

    Args:
      num_processes: how many to start.
      **job: of each of them; see `emulated_worker.Job`.

    Raises:
      RuntimeError: one of them failed; its output has been shown.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder, "out.json")
        job |= {"out": str(out), "num_processes": num_processes}
        if num_processes > 1:
            job["coordinator"] = launch_local.free_address()
        commands = [
            [sys.executable, str(_WORKER), json.dumps(job | {"process_id": i})]
            for i in range(num_processes)
        ]
        log = pathlib.Path(folder, "log")
        with log.open("wb") as stream:
            status = launch_local.launch(commands, out=stream)
        if status:
            sys.stderr.write(log.read_text())
            raise RuntimeError(f"a process of {_WORKER.name} ended with {status}.")
        runs: list[list[dict[str, Any]]] = json.loads(out.read_text())
    return runs


def makespan_s(run: list[dict[str, Any]]) -> float:
    """Returns the time from the first start to the last finish that a host noticed."""
    return max(p["end_s"] for p in run) - min(p["start_s"] for p in run)
