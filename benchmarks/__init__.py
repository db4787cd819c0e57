"""Measurements behind docs/performance: ``nox -s bench -- PART``."""
