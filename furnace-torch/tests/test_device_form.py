"""What a decoder has on a device only: recorded decode steps, KV in blocks, a sampler; as far as a CPU can show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from furnace.contracts import Chunk, ChunkKind, OutOfKvError, Output
from furnace_torch.decoder import TorchDecoder
from furnace_torch.kv_pages import KvPages
from furnace_torch.kv_store import KV_BLOCK
from furnace_torch.sampler import TorchSampler
from furnace_torch.weights import DecoderWeights


class Capture:
    """Records calls as a GPU would, by keeping them; a repetition leaves its result in the same place."""

    def __init__(self) -> None:
        self.recorded: list[tuple[int, ...]] = []

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = call()
        self.recorded.append(tuple(result.shape))

        def repeat() -> None:
            result.copy_(call())

        return repeat, result


def decoded(model: TorchDecoder, drive: Any, lengths: list[int], steps: int) -> list[np.ndarray]:
    """The rows of some steps of sequences with prompts of these lengths, each step in the same batch."""
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, 600).tolist()
    states = [model.open() for _ in lengths]
    driver = drive(model)
    for state, length in zip(states, lengths, strict=True):
        driver.prefill(state, tokens[:length])
    rows = []
    for _ in range(steps):
        batch = [
            Chunk(state, tokens[state.length : state.length + 1], state.length, ChunkKind.DECODE, Output.ALL)
            for state in states
        ]
        rows.append(driver.step(batch).copy())
    for state in states:
        model.release(state)
    return rows


@pytest.mark.parametrize("lengths", [[5], [5, 200, 63], [63, 64, 127, 300, 1], [10] * 8])
def test_recorded_steps_give_what_steps_that_are_not_recorded_give(
    lengths: list[int], tiny_weights: DecoderWeights, drive: Any
) -> None:
    capture = Capture()
    settings: dict[str, Any] = {"name": "x", "max_sequences": 8, "device_form": True}
    recorded = TorchDecoder(tiny_weights, **settings, capture=capture)
    plain = TorchDecoder(tiny_weights, **settings)
    for one, other in zip(decoded(recorded, drive, lengths, 4), decoded(plain, drive, lengths, 4), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    rows = 1 << (len(lengths) - 1).bit_length()
    assert {shape[0] for shape in capture.recorded} == {rows}
    assert recorded.kv_tokens_used == 0


def test_each_size_is_recorded_once_and_rows_that_fill_up_change_nothing(
    tiny_weights: DecoderWeights, drive: Any
) -> None:
    capture = Capture()
    model = TorchDecoder(tiny_weights, name="x", max_sequences=8, device_form=True, capture=capture)
    alone = decoded(model, drive, [40], 6)
    assert len(capture.recorded) == 1
    with_others = decoded(model, drive, [40, 9, 30], 6)
    assert [shape[0] for shape in capture.recorded] == [1, 4]
    decoded(model, drive, [9, 30, 40, 50], 6)
    assert len(capture.recorded) == 2
    for one, other in zip(alone, with_others, strict=True):
        np.testing.assert_allclose(one[0], other[0], atol=1e-4)


def test_a_step_whose_rows_would_read_more_than_the_cache_holds_is_not_recorded(
    tiny_weights: DecoderWeights, drive: Any
) -> None:
    capture = Capture()
    settings: dict[str, Any] = {"name": "x", "max_sequences": 4, "kv_tokens": 8 * KV_BLOCK, "device_form": True}
    model = TorchDecoder(tiny_weights, **settings, capture=capture)
    decoded(model, drive, [5, 100], 1)
    assert [shape[0] for shape in capture.recorded] == [2]
    # Both would be padded to the 8 blocks of the longer one.
    mixed = decoded(model, drive, [300, 5], 1)
    assert len(capture.recorded) == 1
    plain = TorchDecoder(tiny_weights, **settings)
    np.testing.assert_allclose(mixed[0], decoded(plain, drive, [300, 5], 1)[0], atol=1e-4)


def test_a_copy_that_fails_gives_its_slot_and_its_blocks_back(
    tiny_weights: DecoderWeights, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TorchDecoder(tiny_weights, name="x", max_sequences=2, kv_tokens=4 * KV_BLOCK, device_form=True)
    state = model.open()
    drive(model).prefill(state, list(range(100)))
    with monkeypatch.context() as patched:
        patched.setattr(KvPages, "copy", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.fork(state, 100)
    assert model.fork(state, 100)[1] == 100
    assert model.kv_tokens_used == 4 * KV_BLOCK


def test_prefill_and_hidden_values_are_not_recorded(tiny_weights: DecoderWeights, drive: Any) -> None:
    capture = Capture()
    model = TorchDecoder(tiny_weights, name="x", max_sequences=2, device_form=True, capture=capture)
    driver, state = drive(model), model.open()
    driver.prefill(state, [1, 2, 3])
    hidden = driver.step([Chunk(state, [4], 3, ChunkKind.DECODE, Output.HIDDEN)])
    assert isinstance(hidden, np.ndarray)
    assert hidden.shape == (1, tiny_weights.spec.hidden_size)
    assert capture.recorded == []


def test_logits_stay_tensors_for_a_sampler_that_takes_them(tiny_weights: DecoderWeights) -> None:
    model = TorchDecoder(tiny_weights, name="x", max_sequences=2, device_form=True)
    rows = model.step([Chunk(model.open(), [1, 2, 3], 0, ChunkKind.PREFILL, Output.LAST)])
    assert isinstance(rows, torch.Tensor)
    assert isinstance(model.sampler, TorchSampler)


def test_a_step_that_fails_on_the_device_gives_its_blocks_back(
    tiny_weights: DecoderWeights, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TorchDecoder(tiny_weights, name="x", max_sequences=2, kv_tokens=2 * KV_BLOCK, device_form=True)
    driver, state = drive(model), model.open()
    first = driver.prefill(state, list(range(60))).copy()
    with monkeypatch.context() as patched:
        patched.setattr(TorchDecoder, "_forward", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.decode(state, [1] * 10, 60)
    assert (state.length, model.kv_tokens_used) == (60, KV_BLOCK)
    other = model.open()
    np.testing.assert_array_equal(driver.prefill(other, list(range(60))), first)
    with pytest.raises(OutOfKvError):
        driver.decode(state, [1] * 10, 60)
