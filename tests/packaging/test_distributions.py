"""What `pip install furnace-core` brings."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LISTED = (ROOT / "tests/packaging/furnace-core-distributions.txt").read_text().split()
PACKAGES = ("furnace-candle-bridge", "furnace-core", "furnace-mock", "furnace-openvino", "furnace-torch")
# On purpose not by globbing, so that a package that lost its pyproject.toml is missed.
PROJECTS = {package: tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"] for package in PACKAGES}


def brought_by(distribution: str) -> set[str]:
    """The distribution and everything that it requires here, by the metadata of what is installed."""
    found: set[tuple[str, str]] = set()
    waiting = [(distribution, "")]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for requirement in map(Requirement, requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                required = canonicalize_name(requirement.name)
                waiting += [(required, each) for each in ("", *requirement.extras)]
    return {name for name, _ in found}


def test_furnace_core_brings_exactly_the_listed_distributions() -> None:
    assert sorted(brought_by("furnace-core")) == LISTED


def test_furnace_core_brings_at_most_fifty_distributions_and_no_framework() -> None:
    assert len(LISTED) <= 50
    assert not {"torch", "transformers", "tensorflow", "jax"} & set(LISTED)


def test_the_readme_of_furnace_core_says_what_each_dependency_is_for() -> None:
    justified = re.findall(r"^\| ([\w-]+) \| \S.* \|$", (ROOT / "furnace-core/README.md").read_text(), re.MULTILINE)

    assert justified[1:] == [Requirement(line).name for line in PROJECTS["furnace-core"]["dependencies"]]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_dependency_on_a_foreign_package_has_a_lower_bound(package: str) -> None:
    requirements = [Requirement(line) for line in PROJECTS[package]["dependencies"]]

    for requirement in requirements:
        operators = {specifier.operator for specifier in requirement.specifier}
        assert operators & {">=", "==", "~="}, f"{requirement} has no lower bound"
