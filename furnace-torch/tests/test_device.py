"""Which device is taken, what is said where there is none, and in which type it computes."""

from __future__ import annotations

import pytest
import torch

from furnace_torch.device import default_dtype, find_device


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with a torch for CUDA, and without a GPU."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    return monkeypatch


def test_by_itself_it_is_a_gpu_where_there_is_one(machine: pytest.MonkeyPatch) -> None:
    assert find_device("auto") == torch.device("cpu")
    machine.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("auto") == torch.device("mps")
    machine.setattr(torch.cuda, "is_available", lambda: True)
    machine.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("auto") == torch.device("cuda")
    assert find_device("cuda:1") == torch.device("cuda", 1)
    assert find_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "cuda:1", "mps"])
def test_one_that_is_not_there_is_an_error_that_says_how_to_go_on(name: str, machine: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"device={name}: torch sees no GPU.*leave out the option device"):
        find_device(name)


def test_a_torch_without_cuda_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.version, "cuda", None)
    machine.setattr(torch.version, "hip", None)
    with pytest.raises(ValueError, match="is built without CUDA; install one"):
        find_device("cuda")


def test_a_number_beyond_the_gpus_is_named(machine: pytest.MonkeyPatch) -> None:
    machine.setattr(torch.cuda, "is_available", lambda: True)
    machine.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="device=cuda:1: there are 1 GPUs, counted from 0"):
        find_device("cuda:1")


@pytest.mark.parametrize(
    ("device", "capability", "dtype"),
    [("cpu", (0, 0), "float32"), ("cuda", (9, 0), "bfloat16"), ("cuda", (7, 5), "float16"), ("mps", (0, 0), "float16")],
)
def test_the_type_is_one_that_the_device_has_units_for(
    device: str, capability: tuple[int, int], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert default_dtype(torch.device(device)) == getattr(torch, dtype)
