from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.contracts import OutOfKvError
from furnace_torch.kv_arena import KV_BLOCK, KvArena, Slot, blocks


def arena(slots: int = 4, max_context: int = 512, kv_tokens: int = 1024, layers: int = 2) -> KvArena:
    return KvArena(layers=layers, slots=slots, kv_heads=2, max_context=max_context, head_dim=32, kv_tokens=kv_tokens)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_exists_only_where_tokens_are_and_goes_back_on_release() -> None:
    before = resident_bytes()
    # 8 GiB of address space.
    large = arena(slots=128, max_context=65_536, kv_tokens=1 << 30)
    assert resident_bytes() - before < 5e6
    slot = large.open()
    large.resize(slot, 32_768)
    for layer in large.layers:
        layer[:, slot.index, :, : slot.length] = 1.0
    assert resident_bytes() - before > 30e6
    large.release(slot)
    assert resident_bytes() - before < 10e6
    assert not large.layers[0][:, 0].any()


def test_what_the_system_does_not_give_is_an_error_that_names_the_options() -> None:
    with pytest.raises(MemoryError, match="lower max_sequences or max_context"):
        arena(slots=1 << 16, max_context=1 << 30)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["open", "grow", "shrink", "release"]), st.integers(0, 300)), max_size=60))
def test_blocks_in_use_are_those_of_the_open_slots_and_never_above_the_limit(actions: list[tuple[str, int]]) -> None:
    small = arena(slots=3, kv_tokens=8 * KV_BLOCK, layers=1)
    opened: list[Slot] = []
    for action, number in actions:
        slot = opened[number % len(opened)] if opened else None
        if action == "open" and len(opened) < 3:
            opened.append(small.open())
        elif action == "open":
            with pytest.raises(OutOfKvError):
                small.open()
        elif slot is not None and action == "grow":
            length = slot.length + number
            fits = sum(blocks(other.length) for other in opened if other is not slot) + blocks(length) <= 8
            try:
                small.require([(slot, length)])
            except OutOfKvError:
                assert not fits
            else:
                assert fits
                small.resize(slot, min(length, 512))
        elif slot is not None and action == "shrink":
            small.resize(slot, min(slot.length, number))
        elif slot is not None:
            opened.remove(slot)
            small.release(slot)
        assert small.blocks_used == sum(blocks(slot.length) for slot in opened) <= 8
        assert len({slot.index for slot in opened}) == len(opened)


def test_a_copy_holds_the_first_tokens_and_nothing_else() -> None:
    small = arena()
    source, target = small.open(), small.open()
    small.resize(source, 100)
    for layer in small.layers:
        layer[:, source.index, :, :100] = torch.randn(2, 2, 100, 32)
    small.copy(source, target, 70)
    assert target.length == 70
    for layer in small.layers:
        assert torch.equal(layer[:, target.index, :, :70], layer[:, source.index, :, :70])
        assert not layer[:, target.index, :, 70:].any()
