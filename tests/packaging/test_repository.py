"""What holds for the repository as a whole."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import furnace

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "furnace-candle-bridge": "furnace_candle_bridge",
    "furnace-core": "furnace",
    "furnace-mock": "furnace_mock",
    "furnace-openvino": "furnace_openvino",
    "furnace-torch": "furnace_torch",
}
CHECKS = 'python3 -m venv .venv && .venv/bin/pip install "nox[uv]" && .venv/bin/nox'
SERVE = (
    "python3 -m venv .venv && .venv/bin/pip install ./furnace-core ./furnace-torch"
    " && .venv/bin/furnace serve --engine torch:tiny-lm"
)


def text_files() -> list[Path]:
    """Every text file that is, or is about to be, in the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in files if file.is_file() and b"\0" not in file.read_bytes()[:8192]]


def fenced_shell(markdown: str) -> list[str]:
    """Lines of the code blocks that are meant for a shell."""
    blocks = re.findall(r"^[ ]*```(\S*)[^\n]*\n(.*?)^[ ]*```", markdown, re.MULTILINE | re.DOTALL)
    shell = [body for language, body in blocks if language in {"", "sh", "bash", "shell", "console", "{code-block}"}]
    return [line for body in shell for line in body.splitlines()]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_package_has_the_one_version_and_the_licence(package: str) -> None:
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]

    assert project["name"] == package
    assert project["version"] == furnace.__version__
    assert project["license"] == "Apache-2.0"
    assert project["requires-python"] == ">=3.11"


@pytest.mark.parametrize(("package", "module"), PACKAGES.items())
def test_every_package_has_its_files(package: str, module: str) -> None:
    folder = ROOT / package

    assert (folder / "README.md").is_file()
    assert (folder / "src" / module / "py.typed").is_file()
    assert (folder / "tests").is_dir()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    # A path of a home, a shared folder beside the checkout, a host of a package registry. The patterns are written so
    # that they don't match themselves.
    pattern = re.compile(
        r"(?<![\w.])/(?:work|farm|root|opt/dev)/|\.\./shared\b"
        r"|\b(?:pypi|pythonhosted|npmjs|crates|maven)\.(?:org|com|io|apache)\b"
    )
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()[:100]}"
        for file in text_files()
        # Cargo writes there where a crate comes from, in the same words on every machine.
        if file.name != "Cargo.lock"
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]

    assert not found


def test_the_commands_of_the_readme_are_those_that_are_checked() -> None:
    readme = (ROOT / "README.md").read_text()

    assert SERVE in fenced_shell(readme)
    assert CHECKS in fenced_shell(readme)
    assert f"  {CHECKS}\n" in (ROOT / ".ci/run").read_text()


def test_a_spec_with_a_question_mark_is_quoted_for_the_shell() -> None:
    unquoted = re.compile(r"""(?<!['"\w./=:-])(?:--engine[ =])?(?:\w+=)?[a-z]+:[^\s'"]*\?""")
    found = [
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in text_files()
        if file.suffix == ".md"
        for line in fenced_shell(file.read_text())
        if unquoted.search(line)
    ]

    assert not found
