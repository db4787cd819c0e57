"""The command, in a process of its own, with a plugin installed in a folder of the test's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import furnace

SOURCE = Path(furnace.__file__).parent.parent


class Command:
    """Runs ``furnace`` with what is installed in ``site``."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("FURNACE_")},
            "PYTHONPATH": os.pathsep.join([str(site), str(SOURCE)]),
            "PYTHONWARNINGS": "error::ResourceWarning",
        }
        self._running: list[subprocess.Popen[str]] = []

    def install(
        self, distribution: str, *, scheme: str, target: str, version: str = "1.0", group: str = "furnace.engines"
    ) -> None:
        """Install a distribution with one engine, or one plugin of another group."""
        info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{scheme} = {target}\n")

    def __call__(self, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        return subprocess.run(
            [sys.executable, "-m", "furnace", *arguments],
            env=self.env,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=240,
        )

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it; it is killed at the end of the test at the latest."""
        process = subprocess.Popen(
            [sys.executable, "-m", "furnace", *arguments],
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def clean_up(self) -> None:
        """End what still runs."""
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    """The command, with the schemes ``acme`` and ``python``."""
    site = tmp_path / "site"
    site.mkdir()
    shutil.copy(Path(__file__).with_name("acme_engine.py"), site)
    command = Command(site)
    command.install("furnace-acme", scheme="acme", target="acme_engine", version="1.2")
    command.install("furnace-core", scheme="python", target="furnace.plugins.python_file")
    yield command
    command.clean_up()


@pytest.fixture
def url_of() -> Callable[[subprocess.Popen[str]], str]:
    """Waits for the line that says where a server is."""

    def url_of(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.fail(process.communicate()[1])
        return line.rpartition(" on ")[2].strip()

    return url_of
