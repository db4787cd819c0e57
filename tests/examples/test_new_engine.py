"""What ``furnace new-engine`` makes: it passes its own tests at once, and it is served."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

FURNACE = str(Path(sys.executable).with_name("furnace"))
LEVELS = ("step", "batch", "engine")


def made(level: str, folder: Path, name: str = "my-llm") -> Path:
    """A new package."""
    command = [FURNACE, "new-engine", name, "--level", level, "--directory", str(folder)]
    subprocess.run(command, check=True, timeout=240)
    return folder / f"furnace-{name}"


def installed(package: Path) -> dict[str, str]:
    """The environment in which a package is installed: as ``pip install -e`` does it, without what pip would fetch."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    info = package / "installed" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (info / "entry_points.txt").write_text(points)
    return {"PYTHONPATH": os.pathsep.join([str(package / "src"), str(info.parent)])}


@pytest.mark.parametrize("level", LEVELS)
def test_a_new_engine_passes_its_own_tests_at_once(level: str, tmp_path: Path) -> None:
    package = made(level, tmp_path)
    # Without a plugin of the repository's own tests, which its author need not have.
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:asyncio", "-W", "error"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(package / "tests")],
        cwd=package,
        env={**os.environ, **installed(package)},
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout


@pytest.mark.parametrize("level", LEVELS)
def test_a_new_engine_is_served_and_doctor_has_nothing_to_say(
    level: str, tmp_path: Path, serve: Callable[..., str]
) -> None:
    package = made(level, tmp_path)
    env = installed(package)
    spec = "my-llm:demo?seed=3&width=16"
    url = serve([FURNACE, "serve", "--port", "0", "--engine", spec], tmp_path, **env)
    done = subprocess.run(
        [FURNACE, "chat", url, "--max-tokens", "4", "--temperature", "0"],
        input="Hello\n",
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "4 tokens" in done.stderr

    doctor = subprocess.run(
        [FURNACE, "doctor", "--timeout", "100", spec], env={**os.environ, **env}, capture_output=True, text=True
    )
    assert doctor.returncode == 0
    assert "error: " not in doctor.stdout + doctor.stderr
    # On a busy machine every import may take long.
    assert "warning: " not in re.sub("warning: importing it took .*", "", doctor.stdout)


@pytest.mark.parametrize("name", ["ab", "a-rather-long-name-of-my-own"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_new_engine_is_clean_for_ruff_and_mypy(level: str, name: str, tmp_path: Path) -> None:
    tools = Path(sys.executable).parent
    if not ((tools / "ruff").exists() and (tools / "mypy").exists()):
        pytest.skip("ruff and mypy are not in this environment: they come with the group lint")
    package = made(level, tmp_path, name)
    for command in (
        ["ruff", "check", "--no-cache", "."],
        ["ruff", "format", "--no-cache", "--check", "."],
        ["mypy", "--cache-dir", os.devnull, "src", "tests"],
    ):
        done = subprocess.run([tools / command[0], *command[1:]], cwd=package, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
