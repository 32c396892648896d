"""Which package may import which: architecture.md §2, as a table.

`core` and `sim` are pure: of what is not ours they import the standard library only.
Modules directly under `rrfp_jax` (main, the library entry, command lines) may import
anything; nothing may import `main`.
"""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = "rrfp_jax"

# "" is the top level: rrfp_jax/__init__.py and the modules beside it.
MAY_IMPORT = {
    "core": set(),
    "sim": {"core"},
    "transport": {"core"},
    "coordination": {"core", "transport"},
    "runtime": {"core", "transport", "coordination", "sim"},
    "models": set(),
    "data": set(),
    "observe": {"core", "sim"},
    "workloads": {"core", "sim", "models"},
    "train": {
        "core",
        "sim",
        "transport",
        "coordination",
        "runtime",
        "models",
        "data",
        "observe",
    },
}
PURE = ("core", "sim")
NAMELESS = {"utils", "util", "common", "helpers", "helper", "misc"}

MODULES = sorted((ROOT / PACKAGE).rglob("*.py"))


def module_name(path, root=ROOT):
    """Returns the dotted name of a module; of its package for `__init__`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(name):
    """Returns `core` for `rrfp_jax.core.task`; "" for what is not in a known folder."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def imported(source, name, is_package=False):
    """Returns the dotted names that a module imports, wherever in it they stand.

    `from a import b` gives `a.b`, which is right for a module and harmless for a name.
    """
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                kept = parts[: len(parts) - node.level + is_package]
                base = ".".join([*kept, *([base] if base else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def wrong_arrows(source, name, is_package=False):
    """Returns what is wrong with the imports of a module, in words."""
    folder = folder_of(name)
    problems = []
    for target in sorted(imported(source, name, is_package)):
        top = target.split(".")[0]
        if top != PACKAGE:
            if folder in PURE and top not in sys.stdlib_module_names:
                problems.append(f"{name} is pure, but imports {target}")
        elif target == f"{PACKAGE}.main" or target.startswith(f"{PACKAGE}.main."):
            problems.append(f"{name} imports {target}; nothing imports main")
        elif folder:
            to = folder_of(target)
            is_errors = f"{target}.".startswith(f"{PACKAGE}.errors.")
            if not is_errors and to != folder and to not in MAY_IMPORT[folder]:
                problems.append(f"{name} imports {target}, which runs against §2")
    return problems


@pytest.mark.parametrize("path", MODULES, ids=module_name)
def test_no_arrow_runs_the_other_way(path):
    is_package = path.name == "__init__.py"
    source = path.read_text()
    assert not wrong_arrows(source, module_name(path), is_package)


def test_every_folder_has_its_line_in_the_table():
    """A new folder needs a place in architecture.md §2 first."""
    folders = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert folders <= set(MAY_IMPORT)


def test_no_module_is_named_after_nothing():
    """A banner is a function that asks for a name; so is utils.py."""
    assert not [p for p in MODULES if NAMELESS & {p.stem, p.parent.name}]


def test_modules_were_found():
    """Guards the tests above against looking in the wrong place."""
    names = {module_name(path) for path in MODULES}
    assert {"rrfp_jax.errors", "rrfp_jax.core.task", "rrfp_jax.sim.costs"} <= names


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("rrfp_jax.core.task", "import rrfp_jax.sim.costs"),
        ("rrfp_jax.core.task", "from rrfp_jax import sim"),
        ("rrfp_jax.core.task", "from rrfp_jax.runtime import executor"),
        ("rrfp_jax.core.task", "from .. import sim"),
        ("rrfp_jax.core.task", "from ..sim import costs"),
        ("rrfp_jax.core.task", "import jax.numpy as jnp"),
        ("rrfp_jax.core.task", "def f():\n    import numpy"),
        ("rrfp_jax.core.task", "from rrfp_jax import simulate"),
        ("rrfp_jax.core.task", "import rrfp_jax"),
        ("rrfp_jax.sim.costs", "import numpy"),
        ("rrfp_jax.sim.costs", "from rrfp_jax.runtime import executor"),
        ("rrfp_jax.transport.base", "from rrfp_jax.sim import costs"),
        ("rrfp_jax.models.dense", "from rrfp_jax.core import task"),
        ("rrfp_jax.data.config", "from rrfp_jax.models import config"),
        ("rrfp_jax.observe.palette", "import rrfp_jax.runtime"),
        ("rrfp_jax.runtime.executor", "from rrfp_jax.train import loop"),
        ("rrfp_jax.train.loop", "from rrfp_jax import main"),
        ("rrfp_jax.simulate", "from rrfp_jax.main import run"),
    ],
)
def test_a_wrong_arrow_is_seen(name, source):
    """Each of these must be refused."""
    assert wrong_arrows(source, name)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("rrfp_jax.core.task", "import enum\nfrom rrfp_jax.errors import ConfigError"),
        ("rrfp_jax.core.task", "from rrfp_jax import errors\nfrom . import graph"),
        ("rrfp_jax.core.graph", "from rrfp_jax.core.task import Task"),
        ("rrfp_jax.sim.costs", "from rrfp_jax.core import graph"),
        ("rrfp_jax.runtime.executor", "import jax\nfrom rrfp_jax.sim import machine"),
        ("rrfp_jax.train.loop", "from rrfp_jax.models import model"),
        ("rrfp_jax.simulate", "from rrfp_jax.observe import timeline"),
    ],
)
def test_a_right_arrow_is_let_through(name, source):
    assert not wrong_arrows(source, name)
