"""The systems that are compared: where each lives, how it starts, what it runs."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

from rrfp_jax.errors import ConfigError, check_choice

ROOT = pathlib.Path(__file__).parents[2]
THIRD_PARTY = ROOT / "third_party"
OURS = "ours"


@dataclasses.dataclass(frozen=True)
class System:
    """One of them.

    Attributes:
      name: as on the command line and in tables.
      driver: its program, which `third_party/README.md` describes.
      python: that runs it.
      schedules: all that it is measured with.
      is_one_process: whether all ranks live in one process; else one each.
      env: of its processes.
    """

    name: str
    driver: pathlib.Path
    python: pathlib.Path
    schedules: Sequence[str]
    is_one_process: bool = False
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


# name -> its schedules. Each has a folder of its name in third_party.
PEERS: Mapping[str, Sequence[str]] = {
    "torch_pipelining": ("gpipe", "1f1b", "interleaved", "zb_v"),
    "deepspeed": ("1f1b",),
    "spectrax": ("gpipe", "1f1b", "eager_1f1b", "zb_h1", "interleaved"),
}
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # there are more processes than cores
_ON_CPU = {"JAX_PLATFORMS": "cpu"}


def ours() -> System:
    """Returns rrfp_jax, in this environment."""
    driver = ROOT / "scripts/peers/ours.py"
    python = pathlib.Path(sys.executable)
    schedules = ("bf", "bfw", "bf_v", "bfw_v", "1f1b")
    return System(OURS, driver, python, schedules, env=_ON_CPU)


def peer(name: str, venvs: pathlib.Path | None = None) -> System:
    """Returns a peer whose environment is there.

    Args:
      name: of its folder.
      venvs: the folder that has the environments by name; by default each is in
        `.venv` in its peer's folder.

    Raises:
      ConfigError: there is no such peer, or it is not installed.
    """
    check_choice("peers", name, tuple(PEERS))
    venv = THIRD_PARTY / name / ".venv" if venvs is None else venvs / name
    python = venv / "bin/python"
    if not python.exists():
        commands = "\n    ".join(install(name, venv))
        raise ConfigError(
            f"{name} is not installed: there is no {_shown(python)}.\n"
            f"  Install it (third_party/{name}/README.md), or leave it out of "
            f"--peers:\n    {commands}"
        )
    env = _ON_CPU if name == "spectrax" else dict(_ONE_THREAD)
    if name == "deepspeed":  # it compiles an extension when it first starts
        env = env | {"DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(venv / "ext")}
    return System(
        name,
        THIRD_PARTY / name / "driver.py",
        python,
        PEERS[name],
        is_one_process=name == "spectrax",
        env=env,
    )


def install(name: str, venv: pathlib.Path) -> list[str]:
    """Returns the commands that install a peer, to be run where the project lies."""
    requirements = f"third_party/{name}/requirements.txt"
    return [
        f"python3.11 -m venv {_shown(venv)}",
        f"{_shown(venv)}/bin/pip install -r {requirements}",
    ]


def _shown(path: pathlib.Path) -> str:
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)
