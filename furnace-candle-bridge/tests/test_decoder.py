"""What is this decoder's own; what it has in common with other engines is tested with them, in tests/engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from furnace.checkpoint import open_checkpoint
from furnace.contracts import Chunk, ChunkKind, EngineContext, Output

pytest.importorskip("furnace_candle_bridge._native", reason="the native module is not built: it needs cargo")

from furnace_candle_bridge import _native, weights
from furnace_candle_bridge.decoder import CandleDecoder
from furnace_candle_bridge.determinism import is_independent


def test_the_best_kernels_of_this_processor_are_used(load: Any) -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        model = weights.build_model(checkpoint, threads=1, max_context=64)
    assert model.kernels == _native.available_kernels()[0]
    assert _native.available_kernels()[-1] == "portable"


def test_a_type_that_has_no_kernel_becomes_float32(
    load: Any, prefill: Any, random_tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(40, load().vocab_size)
    expected = prefill(load(), tokens)
    monkeypatch.setattr(_native, "stored_types", list)
    np.testing.assert_allclose(prefill(load(), tokens), expected, atol=1e-4)


def test_rows_are_handed_over_without_a_copy_and_may_be_overwritten(load: Any) -> None:
    model = load()
    first = model.step([Chunk(model.open(), [1, 2, 3], 0, ChunkKind.PREFILL, Output.ALL)])
    assert first.shape == (3, model.vocab_size)
    assert first.dtype == np.float32
    view = memoryview(first.base)
    assert (view.format, view.shape, view.readonly) == ("f", first.shape, False)
    first[2, 5] = 7.5
    assert view[2, 5] == 7.5
    kept = first.copy()
    model.step([Chunk(model.open(), [4], 0, ChunkKind.PREFILL, Output.LAST)])
    np.testing.assert_array_equal(first, kept)


def test_arrays_that_contradict_each_other_are_refused(load: Any) -> None:
    native = load()._native
    state = native.open()
    for arrays in [
        ([state], [0], [1], [1], []),
        ([state], [0], [1], [1], [1, 2]),
        ([state], [0, 0], [1], [1], [1]),
        ([state], [0], [1], [4], [1]),
    ]:
        with pytest.raises(ValueError, match=r"tokens|lengths|output"):
            native.step(*arrays)
    with pytest.raises(OverflowError):
        native.step([state], [0], [-1], [1], [])


def test_weights_of_another_size_than_they_say_are_refused() -> None:
    loader = _native.Loader(1)
    with pytest.raises(ValueError, match=r"^embed: 15 bytes are not the weights of 2 x 2"):
        loader.matrix("embed", "F32", (2, 2), bytes(15))
    with pytest.raises(ValueError, match="multiple of 32"):
        loader.matrix("embed", "Q8_0", (2, 33), bytes(72))
    with pytest.raises(ValueError, match="Q9_9 is not one of F32"):
        loader.matrix("embed", "Q9_9", (2, 2), bytes(16))
    with open_checkpoint("tiny-lm") as checkpoint, pytest.raises(ValueError, match=r"matrix layers\.0\..* is missing"):
        loader.build(checkpoint.spec, [([1.0] * (checkpoint.spec.head_dim // 2),) * 2], [(None, 0)])


def test_a_cache_below_a_block_is_refused(load: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        load(context=EngineContext(kv_tokens=31))


class Drifting(CandleDecoder):
    """A model whose logits depend a little on how many rows there are."""

    def step(self, batch: Sequence[Chunk]) -> Any:
        rows = super().step(batch)
        rows += np.float32(1e-6) * sum(len(chunk.tokens) for chunk in batch)
        return rows


def test_the_trial_at_load_finds_rows_that_depend_on_each_other() -> None:
    with open_checkpoint("tiny-lm") as checkpoint:
        model = weights.build_model(checkpoint, threads=2, max_context=64)
        vocab_size = checkpoint.spec.vocab_size
    assert is_independent(CandleDecoder(model, name="good", vocab_size=vocab_size, max_context=64))
    assert not is_independent(Drifting(model, name="bad", vocab_size=vocab_size, max_context=64))
    assert not is_independent(CandleDecoder(model, name="short", vocab_size=vocab_size, max_context=32))
