"""Where the limits of this process's control groups stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

__all__ = ["group_folders", "read_limit"]


def group_folders(root: Path) -> Iterator[Path]:
    """The folder of this process's group (cgroup 2), then those of its parents, whose limits hold as well.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    mount = root / "sys/fs/cgroup"
    path = "/"
    for line in read_limit(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            path = line[3:]
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder == mount.parent:
            break
        yield folder


def read_limit(path: Path) -> str:
    """A file's text; empty where this system has no such limit."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
