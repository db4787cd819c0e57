"""How much memory this process may use."""

from __future__ import annotations

from pathlib import Path

from furnace.plugins.cgroup import group_folders, read_limit

__all__ = ["usable_memory"]


def usable_memory(*, root: Path = Path("/")) -> int | None:
    """Bytes of memory of this machine, or fewer if a control group (a container's limit) allows less; None if unknown.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    limits = [read_limit(folder / "memory.max") for folder in group_folders(root)]
    limits.append(read_limit(root / "sys/fs/cgroup/memory/memory.limit_in_bytes"))
    known = [int(limit) for limit in limits if limit.strip().isdigit()]
    for line in read_limit(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            known.append(int(line.split()[1]) * 1024)
    return min(known, default=None)
