"""What the frameworks that engines compute with can run on. Only in the process that imports plugins."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["DEVICES", "FRAMEWORKS"]


def _torch() -> tuple[list[str], int | None]:
    torch: Any = importlib.import_module("torch")
    devices = ["cpu"]
    if torch.cuda.is_available():
        devices += [
            f"cuda:{index} {torch.cuda.get_device_name(index)}, "
            f"{torch.cuda.get_device_properties(index).total_memory / 1e9:.0f} GB"
            for index in range(torch.cuda.device_count())
        ]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return devices, torch.get_num_threads()


def _openvino() -> tuple[list[str], int | None]:
    openvino: Any = importlib.import_module("openvino")
    core = openvino.Core()
    return [f"{device} {core.get_property(device, 'FULL_DEVICE_NAME')}" for device in core.available_devices], None


DEVICES: dict[str, Callable[[], tuple[list[str], int | None]]] = {"openvino": _openvino, "torch": _torch}
"""By the module (and distribution) of a framework: imports it, and gives its devices and its number of threads."""

FRAMEWORKS = ("jax", "openvino", "tensorflow", "torch", "transformers")
"""What no plugin may load when it is imported."""
