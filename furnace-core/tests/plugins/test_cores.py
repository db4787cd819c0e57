from __future__ import annotations

import os
from pathlib import Path

import pytest

from furnace.plugins import default_context
from furnace.plugins.cores import usable_cores
from furnace.plugins.memory import usable_memory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file system of its own, on a machine of 16 cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_without_a_quota_the_affinity_mask_counts(root: Path) -> None:
    assert usable_cores(root=root) == 16


def test_without_an_affinity_mask_all_cores_count(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores(root=root) == 6


def test_a_container_limit_is_rounded_up_to_whole_cores(root: Path) -> None:
    write(root, "sys/fs/cgroup/cpu.max", "250000 100000\n")
    assert usable_cores(root=root) == 3


def test_the_smallest_quota_on_the_way_to_the_root_holds(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/app/worker\n")
    write(root, "sys/fs/cgroup/app/worker/cpu.max", "max 100000\n")
    write(root, "sys/fs/cgroup/app/cpu.max", "400000 100000\n")
    assert usable_cores(root=root) == 4


def test_cgroup_1_and_nonsense_are_read_too(root: Path) -> None:
    write(root, "sys/fs/cgroup/cpu.max", "nonsense")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000\n")
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert usable_cores(root=root) == 2
    write(root, "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert usable_cores(root=root) == 16


def test_models_share_the_cores_and_each_gets_one_at_least() -> None:
    assert default_context(1).threads == usable_cores()
    assert default_context(10_000).threads == 1


def test_memory_is_the_machines_or_less_if_a_group_or_a_parent_allows_less(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    assert usable_memory(root=tmp_path) is None
    write("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 1 kB\n")
    assert usable_memory(root=tmp_path) == 1_024_000
    write("proc/self/cgroup", "0::/outer/inner\n")
    write("sys/fs/cgroup/outer/inner/memory.max", "max\n")
    assert usable_memory(root=tmp_path) == 1_024_000
    write("sys/fs/cgroup/outer/memory.max", "500000\n")
    assert usable_memory(root=tmp_path) == 500_000
