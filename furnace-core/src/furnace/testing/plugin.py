"""Options for pytest; load them with ``pytest_plugins = ["furnace.testing.plugin"]``. The checks work without."""

from __future__ import annotations

import pytest

from furnace.testing.seed import current_seed, set_seed

__all__ = ["pytest_addoption", "pytest_configure", "pytest_report_header"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--furnace-seed``."""
    parser.getgroup("furnace").addoption(
        "--furnace-seed", type=int, help="Seed of furnace's conformance checks, to repeat a run."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Take the seed."""
    seed = config.getoption("--furnace-seed")
    if seed is not None:
        set_seed(seed)


def pytest_report_header() -> str:
    """Say which seed it is, so that the run can be repeated."""
    return f"furnace conformance seed: {current_seed()}"
