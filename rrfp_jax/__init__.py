"""Readiness-first pipeline-parallel training in JAX."""
