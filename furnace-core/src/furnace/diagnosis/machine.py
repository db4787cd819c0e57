"""What this machine has, read from the system without any library of a device."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import furnace
from furnace.diagnosis.report import Machine
from furnace.plugins.cores import usable_cores
from furnace.plugins.memory import usable_memory

__all__ = ["look_at_machine"]

# As Linux calls them, the x86 ones first.
_FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def look_at_machine(*, root: Path = Path("/")) -> Machine:
    """Describe processor, memory and GPUs.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    cpu, flags = _processor(_read(root / "proc/cpuinfo"))
    return Machine(
        furnace=furnace.__version__,
        python=f"{platform.python_version()} {platform.python_implementation()}",
        platform=f"{platform.system()} {platform.release()}",
        architecture=platform.machine(),
        cpu=cpu or platform.processor(),
        features=[name for name in _FEATURES if name in flags],
        cores=usable_cores(root=root),
        cores_total=os.cpu_count() or 1,
        memory=usable_memory(root=root),
        gpus=_nvidia_gpus(root),
    )


def _processor(cpuinfo: str) -> tuple[str, set[str]]:
    """The first core's name and flags; all cores of a machine that anybody serves from have the same."""
    name = re.search(r"^model name\s*: (.*)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo, re.MULTILINE)
    return name[1].strip() if name else "", set(flags[1].split()) if flags else set()


def _nvidia_gpus(root: Path) -> list[str]:
    files = sorted((root / "proc/driver/nvidia/gpus").glob("*/information"))
    names = [re.search(r"^Model:\s*(.*)$", _read(file), re.MULTILINE) for file in files]
    return [name[1].strip() if name else "NVIDIA GPU" for name in names]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
