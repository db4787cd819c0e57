from __future__ import annotations

import gc
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from furnace_openvino.decoder import cache_inputs
from furnace_openvino.kv_cache import KvCache, kv_token_bytes


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_exists_only_where_tokens_are_and_goes_back_when_blocks_are_dropped(compiled: Any) -> None:
    inputs = cache_inputs(compiled)
    gc.collect()  # what earlier tests left must not go meanwhile
    before = resident_bytes()
    # Some 8 GiB of address space.
    cache = KvCache(inputs, (8 << 30) // (kv_token_bytes(inputs) * 32))
    assert resident_bytes() - before < 5e6
    blocks = range(100, 1100)
    for tensor in cache.tensors.values():
        tensor.data[blocks.start : blocks.stop] = 1
    written = 1000 * 32 * kv_token_bytes(inputs)
    assert resident_bytes() - before > 0.9 * written
    cache.drop(blocks)
    assert resident_bytes() - before < 0.1 * written


def test_dropping_blocks_leaves_their_neighbours_alone(compiled: Any) -> None:
    cache = KvCache(cache_inputs(compiled), 64)
    for tensor in cache.tensors.values():
        tensor.data[:] = 1
    cache.drop([40, 7, 8, 9, 20])
    kept = [block for block in range(64) if block not in {7, 8, 9, 20, 40}]
    for tensor in cache.tensors.values():
        assert (tensor.data[kept] == 1).all()


def test_a_copied_block_holds_the_same_in_every_layer(compiled: Any) -> None:
    cache = KvCache(cache_inputs(compiled), 8)
    rng = np.random.default_rng(0)
    for tensor in cache.tensors.values():
        tensor.data[:] = rng.standard_normal(tensor.data.shape)
    before = {name: tensor.data.copy() for name, tensor in cache.tensors.items()}
    cache.copy([(3, 5), (5, 6)])
    for name, tensor in cache.tensors.items():
        for target in (5, 6):
            np.testing.assert_array_equal(tensor.data[target], before[name][3])
        np.testing.assert_array_equal(tensor.data[:5], before[name][:5])


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="there are no huge pages to advise against")
def test_a_system_that_takes_no_advice_on_huge_pages_gets_a_cache_too(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Advice that there is none of is refused as a kernel without huge pages refuses this one.
    monkeypatch.setattr(mmap, "MADV_NOHUGEPAGE", 12345)
    assert KvCache(cache_inputs(compiled), 4).tensors


def test_what_the_system_does_not_give_is_an_error_that_names_the_option(compiled: Any) -> None:
    with pytest.raises(MemoryError, match="lower kv_tokens"):
        KvCache(cache_inputs(compiled), 1 << 50)
