"""What would be faster on this machine, as measured in docs/performance/engines.md."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from furnace.diagnosis.report import Machine

__all__ = ["RULES", "Faster", "faster_engine"]


@dataclass(frozen=True)
class Faster:
    """An engine that takes the same models and is faster.

    Attributes:
        than: the scheme that was asked for.
        scheme: the faster one.
        distribution: that brings it.
        architectures: where that was measured.
        why: what to tell, behind "on a CPU".
    """

    than: str
    scheme: str
    distribution: str
    architectures: Collection[str]
    why: str


_X86 = ("x86_64", "AMD64")

RULES = (Faster("torch", "openvino", "furnace-openvino", _X86, "several times as fast"),)


def faster_engine(
    scheme: str, machine: Machine, devices: Collection[str], installed: Collection[str], model: str
) -> str | None:
    """A line that names a faster engine, or a faster device of this one; None if there is none.

    Args:
        scheme: what was asked for.
        machine: where it would run.
        devices: what the engine's framework can compute on.
        installed: the schemes that are there.
        model: behind the scheme.
    """
    if any(not device.lower().startswith("cpu") for device in devices):
        return None
    if machine.gpus:
        if not devices:
            return None
        return (
            f"this machine has {machine.gpus[0]}, but the framework of {scheme} sees no GPU: install its build for "
            "CUDA, and look at CUDA_VISIBLE_DEVICES"
        )
    for rule in RULES:
        if rule.than == scheme and machine.architecture in rule.architectures:
            install = "" if rule.scheme in installed else f"pip install {rule.distribution}, then "
            return f"on a CPU {rule.distribution} is {rule.why}: {install}--engine {rule.scheme}:{model}"
    return None
