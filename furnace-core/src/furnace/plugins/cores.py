"""How many CPU cores this process may use."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

from furnace.plugins.cgroup import group_folders, read_limit

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
    for folder in group_folders(root):
        quota, _, period = read_limit(folder / "cpu.max").strip().partition(" ")
        yield from _cores(quota, period)
    version_1 = root / "sys/fs/cgroup/cpu"
    yield from _cores(read_limit(version_1 / "cpu.cfs_quota_us"), read_limit(version_1 / "cpu.cfs_period_us"))


def _cores(quota: str, period: str) -> Iterator[int]:
    # "max" and -1 mean no limit.
    if quota.strip().isdigit() and period.strip().isdigit() and int(period) > 0:
        yield math.ceil(int(quota) / int(period))
