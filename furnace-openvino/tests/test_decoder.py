"""What a model holds after a step or a copy that failed: the same as before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from furnace.contracts import Chunk, ChunkKind, Output
from furnace_openvino.decoder import OpenVinoDecoder


class Faulty:
    """A compiled model, and its only request, which fails where a test says so."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.fault = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def create_infer_request(self) -> Any:
        request, faulty = self._compiled.create_infer_request(), self

        class Request:
            def __getattr__(self, name: str) -> Any:
                if name == faulty.fault:
                    raise RuntimeError(f"{name} failed")
                return getattr(request, name)

        return Request()


@pytest.fixture
def faulty(compiled: Any) -> Faulty:
    return Faulty(compiled)


@pytest.fixture
def model(faulty: Any) -> Iterator[OpenVinoDecoder]:
    model = OpenVinoDecoder(faulty, name="m", max_context=256, max_sequences=4)
    yield model
    model.close()


def prefill(state: Any, tokens: list[int]) -> Chunk:
    return Chunk(state, tokens, state.length, ChunkKind.PREFILL, Output.LAST)


def step(model: OpenVinoDecoder, *chunks: Chunk) -> Any:
    return np.array(model.step(chunks))


def shared_cut(model: OpenVinoDecoder) -> tuple[Any, Any]:
    """A state that ends inside a block which another one has whole, and the other one."""
    other = model.open()
    step(model, prefill(other, list(range(5, 69))))
    cut, _ = model.fork(other, 64)
    model.truncate(cut, 40)
    return cut, other


@pytest.mark.parametrize("fault", ["set_tensor", "infer", "get_tensor"])
def test_after_a_failed_step_every_state_goes_on_as_if_nothing_had_been(
    fault: str, model: OpenVinoDecoder, faulty: Faulty, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = list(range(100, 170))

    def run(fails: bool) -> Any:
        cut, other = shared_cut(model)
        fresh = model.open()
        used = model.kv_tokens_used
        batch = [prefill(fresh, new), prefill(cut, new), prefill(other, new[:1])]
        if fails:
            faulty.fault = fault
            with pytest.raises(RuntimeError, match=f"{fault} failed"):
                model.step(batch)
            faulty.fault = ""
            assert [fresh.length, cut.length, other.length] == [0, 40, 64]
            # The copy of the block that was shared and cut stays: it holds the same.
            assert model.kv_tokens_used == used + 32
            assert len(dropped) == 3 + 2 + 1
        rows = [step(model, *batch), step(model, prefill(cut, [7]), prefill(other, [8]))]
        for state in (fresh, cut, other):
            model.release(state)
        assert model.kv_tokens_used == 0
        return np.concatenate(rows)

    expected = run(fails=False)
    dropped = record_drops(model, monkeypatch)
    np.testing.assert_array_equal(run(fails=True), expected)


def record_drops(model: OpenVinoDecoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    dropped: list[int] = []
    drop: Callable[[list[int]], None] = model._cache.drop

    def record(blocks: list[int]) -> None:
        dropped.extend(blocks)
        drop(blocks)

    monkeypatch.setattr(model._cache, "drop", record)
    return dropped


@pytest.mark.parametrize("what", ["fork", "step"])
def test_a_failed_copy_leaves_neither_blocks_nor_states_behind(
    what: str, model: OpenVinoDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut, other = shared_cut(model)

    def fail(copies: object) -> None:
        raise MemoryError("no copy")

    with monkeypatch.context() as patched:
        patched.setattr(model._cache, "copy", fail)
        with pytest.raises(MemoryError, match="no copy"):
            model.fork(other, 40) if what == "fork" else model.step([prefill(cut, [1])])
    assert (cut.length, other.length) == (40, 64)
    for state in (cut, other):
        model.release(state)
    assert model.kv_tokens_used == 0
    for _ in range(model.limits.max_open):
        model.open()


def test_hidden_values_of_a_graph_without_them_are_refused_before_anything_changes(compiled: Any) -> None:
    class Headless(Faulty):
        @property
        def outputs(self) -> list[Any]:
            return [port for port in self._compiled.outputs if "hidden" not in port.get_names()]

    headless: Any = Headless(compiled)
    model = OpenVinoDecoder(headless, name="m", max_context=64)
    assert not model.capabilities.hidden
    state = model.open()
    with pytest.raises(ValueError, match="does not have them"):
        model.step([Chunk(state, [1], 0, ChunkKind.PREFILL, Output.HIDDEN)])
    assert (state.length, model.kv_tokens_used) == (0, 0)


def test_a_model_can_be_closed_twice(compiled: Any) -> None:
    model = OpenVinoDecoder(compiled, name="m", max_context=64)
    model.close()
    model.close()
