"""Where to compute, in which type, and how much memory there is."""

from __future__ import annotations

import torch

__all__ = ["default_dtype", "find_device", "free_bytes"]

_OTHERWISE = "or leave out the option device"


def find_device(name: str) -> torch.device:
    """Return the device that an operator asked for.

    Args:
        name: `auto` (the first GPU, or the CPU where there is none), `cpu`, `cuda`, `cuda:N` or `mps`.

    Raises:
        ValueError: It is not there; the message says what to do.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda":
        _check_cuda(device)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device=mps: torch sees no GPU of a Mac here; take another one, {_OTHERWISE}")
    return device


def _check_cuda(device: torch.device) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(
            f"device={device}: torch {torch.__version__} is built without CUDA; install one that has it "
            f"(https://pytorch.org/get-started/locally), {_OTHERWISE}"
        )
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or not count:
        raise ValueError(f"device={device}: torch sees no GPU; see whether nvidia-smi shows one, {_OTHERWISE}")
    if device.index is not None and device.index >= count:
        raise ValueError(f"device={device}: there are {count} GPUs, counted from 0; take one of them, {_OTHERWISE}")


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the type of the weights that a device is fast with."""
    if device.type == "cpu":
        return torch.float32
    # GPUs have units for bfloat16 since NVIDIA's compute capability 8.
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return torch.float16


def free_bytes(device: torch.device) -> int:
    """Return how much of a GPU's memory nobody uses."""
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    return torch.cuda.mem_get_info(device)[0]
