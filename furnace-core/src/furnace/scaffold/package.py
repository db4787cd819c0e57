"""Writes the package."""

from __future__ import annotations

import string
from importlib.resources import files
from pathlib import Path
from typing import Literal, get_args

import furnace
from furnace.contracts.errors import quote
from furnace.scaffold.names import EngineNames

__all__ = ["LEVELS", "Level", "ScaffoldError", "write_package"]

Level = Literal["step", "batch", "engine"]
"""What the author writes: one sequence at a time, many in a step, or an engine with a scheduler of its own."""

LEVELS: tuple[Level, ...] = get_args(Level)

_SCHEDULED = """\
        step_model = ${classes}Model(pipeline.vocab_size, max_context, options)
        return furnace.Scheduled(step_model, pipeline)"""
# How create() ends.
_MADE = {
    "step": _SCHEDULED,
    "batch": _SCHEDULED,
    "engine": "        return ${classes}Engine(pipeline, max_context, options)",
}
_PART = {"step": ("model", "Model"), "batch": ("model", "Model"), "engine": ("engine", "Engine")}


class ScaffoldError(Exception):
    """The package can't be written; the message is one line for the person who asked."""


def write_package(names: EngineNames, level: Level, directory: Path) -> list[Path]:
    """Write a package of five files into a new folder ``furnace-NAME`` in ``directory``.

    Returns:
        The files.

    Raises:
        ScaffoldError: the folder is there already, or its parent is not.
        OSError: it can't be written.
    """
    folder = directory / names.distribution
    if not directory.is_dir():
        raise ScaffoldError(f"there is no directory {quote(str(directory))} to put {names.distribution} into")
    try:
        folder.mkdir()
    except FileExistsError:
        raise ScaffoldError(f"{quote(str(folder))} is there already; move it away, or choose another name") from None
    part, kind = _PART[level]
    values = {
        "scheme": names.scheme,
        "distribution": names.distribution,
        "module": names.module,
        "classes": names.classes,
        "version": furnace.__version__,
        "part": part,
        "kind": kind,
        "made": string.Template(_MADE[level]).substitute(classes=names.classes),
    }
    written = []
    for template, target in _files(names, level, part).items():
        text = files("furnace.scaffold").joinpath("templates", template).read_text(encoding="utf-8")
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(string.Template(text).substitute(values), encoding="utf-8")
        written.append(path)
    return written


def _files(names: EngineNames, level: Level, part: str) -> dict[str, str]:
    """Where each template goes."""
    return {
        "pyproject.toml.template": "pyproject.toml",
        "README.md.template": "README.md",
        "plugin.py.template": f"src/{names.module}/__init__.py",
        ("engine" if level == "engine" else f"{level}_model") + ".py.template": f"src/{names.module}/{part}.py",
        "test_conformance.py.template": "tests/test_conformance.py",
    }
