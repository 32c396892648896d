"""Readiness-first pipeline-parallel training in JAX.

    from rrfp_jax import Pipeline, Policy, Stage, split

Importing the package does not import JAX; the first use of one of these names does.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrfp_jax.core.policies import Policy
    from rrfp_jax.runtime.emulation import Emulation
    from rrfp_jax.runtime.microbatches import split
    from rrfp_jax.runtime.pipeline import Pipeline
    from rrfp_jax.runtime.stage import Stage

__all__ = ["Emulation", "Pipeline", "Policy", "Stage", "split"]

_HOMES = {
    "Emulation": "rrfp_jax.runtime.emulation",
    "Pipeline": "rrfp_jax.runtime.pipeline",
    "Policy": "rrfp_jax.core.policies",
    "Stage": "rrfp_jax.runtime.stage",
    "split": "rrfp_jax.runtime.microbatches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rrfp_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
