"""Fake distributions: what pip would have installed, written into a folder of the test's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[..., Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty site-packages at the head of sys.path; modules imported from it are forgotten afterwards."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        origin = getattr(sys.modules[name], "__file__", None)
        if origin is not None and Path(origin).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def install(site: Path) -> Install:
    """``install("furnace-acme", scheme="acme", code=...)`` installs a distribution with one engine.

    With ``group="furnace.plugins"`` it is a plugin of the HTTP process of that name.
    """

    def install(
        distribution: str,
        *,
        scheme: str,
        code: str = "",
        version: str = "1.0",
        target: str | None = None,
        group: str = "furnace.engines",
    ) -> Path:
        module = distribution.replace("-", "_")
        (site / f"{module}.py").write_text(code)
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{scheme} = {target or module}\n")
        # The folder may have been looked through a moment ago, in the same tick of the file system's clock.
        importlib.invalidate_caches()
        return info

    return install


@pytest.fixture
def core(install: Install) -> None:
    """furnace-core's own entry point, also where furnace is not installed but on the path."""
    install("furnace-core", scheme="python", target="furnace.plugins.python_file")
