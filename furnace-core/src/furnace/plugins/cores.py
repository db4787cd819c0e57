"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["usable_cores"]


def usable_cores(*, root: Path = Path("/")) -> int:
    """Cores in the affinity mask, or fewer if a cgroup quota (a container's CPU limit) allows less; at least 1.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([cores, *_quotas(root)]))


def _quotas(root: Path) -> Iterator[int]:
    """Every limit that holds for this process, in whole cores, rounded up: cgroup 2, then cgroup 1."""
    mount = root / "sys/fs/cgroup"
    path = "/"
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            path = line[3:]
    # A quota of any parent group holds as well.
    group = mount / path.lstrip("/")
    for folder in (group, *group.parents):
        if folder == mount.parent:
            break
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        yield from _cores(quota, period)
    yield from _cores(_read(mount / "cpu/cpu.cfs_quota_us"), _read(mount / "cpu/cpu.cfs_period_us"))


def _cores(quota: str, period: str) -> Iterator[int]:
    # "max" and -1 mean no limit.
    if quota.strip().isdigit() and period.strip().isdigit() and int(period) > 0:
        yield math.ceil(int(quota) / int(period))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""  # this system has no such limit
