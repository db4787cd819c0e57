from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from furnace.contracts import Chunk, ChunkKind, Output
from furnace_openvino.blocks import KV_BLOCK, BlockTable, block_count
from furnace_openvino.step_input import GRID, arrange

BLOCKS = range(10, 60)


def chunk(
    kind: ChunkKind, position: int, count: int, output: Output = Output.LAST, first_block: int = BLOCKS.start
) -> Chunk:
    blocks = list(range(first_block, first_block + block_count(position + count)))
    return Chunk(BlockTable(blocks, position + count), list(range(count)), position, kind, output)


def runs(batch: list[Chunk], *, split_decode: bool = True) -> list[tuple[int, int]]:
    """Position and length of each run that is attended together."""
    step = arrange(batch, split_decode=split_decode)
    return [(past, end - begin) for past, (begin, end) in zip(step.past, pairwise(step.begins), strict=True)]


def test_each_token_of_a_decode_chunk_is_attended_alone_and_sees_those_before_it() -> None:
    step = arrange([chunk(ChunkKind.DECODE, 62, 3, Output.ALL)], split_decode=True)
    assert step.past == [62, 63, 64]
    assert step.blocks == [10, 11, 10, 11, 10, 11, 12]
    assert step.block_begins == [0, 2, 4, 7]
    assert step.positions == [62, 63, 64]
    assert step.wanted == [0, 1, 2]
    assert step.longest == 65


def test_a_decode_chunk_whose_cache_is_quantized_is_one_run() -> None:
    assert runs([chunk(ChunkKind.DECODE, 40, 3)], split_decode=False) == [(40, 3)]


def test_the_last_token_of_a_prompt_is_attended_alone_wherever_it_begins_a_cell() -> None:
    assert runs([chunk(ChunkKind.PREFILL, 0, 65)]) == [(0, 64), (64, 1)]
    assert runs([chunk(ChunkKind.PREFILL, 32, 33)]) == [(32, 32), (64, 1)]
    assert runs([chunk(ChunkKind.PREFILL, 64, 1)]) == [(64, 1)]
    assert runs([chunk(ChunkKind.PREFILL, 0, 64)]) == [(0, 64)]
    assert runs([chunk(ChunkKind.PREFILL, 0, 66)]) == [(0, 66)]


def test_steps_of_single_rows_get_a_run_without_rows() -> None:
    single = arrange([chunk(ChunkKind.DECODE, 40, 1), chunk(ChunkKind.DECODE, 5, 1)], split_decode=True)
    arrays = single.arrays(hidden=False, min_rows=1)
    assert arrays["subsequence_begins"].tolist() == [0, 1, 2, 2]
    assert arrays["block_indices_begins"].tolist() == [0, 2, 3, 3]
    assert arrays["past_lens"].tolist() == [40, 5, 0]
    mixed = arrange([chunk(ChunkKind.DECODE, 40, 1), chunk(ChunkKind.PREFILL, 0, 5)], split_decode=True)
    assert mixed.arrays(hidden=False, min_rows=1)["subsequence_begins"].tolist() == [0, 1, 6]


def test_a_lone_row_is_filled_up_with_rows_of_nobody_in_block_0() -> None:
    arrays = arrange([chunk(ChunkKind.DECODE, 40, 1)], split_decode=True).arrays(hidden=False, min_rows=2)
    assert arrays["position_ids"].tolist() == [40, 0]
    assert arrays["block_indices"].tolist() == [10, 11, 0]
    assert arrays["past_lens"].tolist() == [40, 0, 0]
    assert arrays["wanted_rows"].tolist() == [0, 0]


@pytest.mark.parametrize(("rows", "filled"), [(32, 32), (33, 40), (40, 40), (129, 136)])
def test_many_rows_become_a_multiple_of_8_so_that_few_numbers_of_rows_occur(rows: int, filled: int) -> None:
    step = arrange([chunk(ChunkKind.PREFILL, 0, rows)], split_decode=True)
    arrays = step.arrays(hidden=False, min_rows=2)
    assert len(arrays["input_ids"]) == arrays["subsequence_begins"][-1] == filled
    assert arrays["wanted_rows"].tolist() == [rows - 1] * 2
    assert arrays["block_indices"][-1] == (0 if filled > rows else arrays["block_indices"].max())


def test_a_single_wanted_row_is_asked_for_twice_and_none_not_at_all() -> None:
    prefill = arrange([chunk(ChunkKind.PREFILL, 0, 7)], split_decode=True).arrays(hidden=False, min_rows=2)
    assert prefill["wanted_rows"].tolist() == [6, 6]
    silent = arrange([chunk(ChunkKind.PREFILL, 0, 7, Output.NONE)], split_decode=True)
    assert silent.arrays(hidden=False, min_rows=2)["wanted_rows"].tolist() == []


def test_hidden_rows_ask_for_no_logits() -> None:
    arrays = arrange([chunk(ChunkKind.PREFILL, 0, 3, Output.HIDDEN)], split_decode=True).arrays(hidden=True, min_rows=1)
    assert arrays["hidden_rows"].tolist() == [0, 1, 2]
    assert arrays["wanted_rows"].tolist() == []


chunks = st.lists(
    st.tuples(
        st.sampled_from(ChunkKind),
        st.integers(0, 12).map(lambda cells: cells * GRID) | st.integers(0, 400),
        st.integers(1, 300),
        st.sampled_from([Output.NONE, Output.LAST, Output.ALL]),
    ),
    min_size=1,
    max_size=12,
)


@given(chunks, st.integers(1, 4), st.booleans())
def test_every_token_is_in_one_run_that_has_its_blocks_and_outputs_are_in_order(
    parts: list[tuple[ChunkKind, int, int, Output]], min_rows: int, split_decode: bool
) -> None:
    batch = []
    for place, (kind, position, size, output) in enumerate(parts):
        count = size if kind is ChunkKind.PREFILL else 1 + size % 16
        batch.append(chunk(kind, position, count, output, first_block=1 + 30 * place))
    step = arrange(batch, split_decode=split_decode)
    rows = [
        (token, part.position + offset, part.state.blocks[(part.position + offset) // KV_BLOCK])
        for part in batch
        for offset, token in enumerate(part.tokens)
    ]
    wanted = [
        row
        for part in batch
        for row in {Output.NONE: [], Output.LAST: [len(part.tokens) - 1], Output.ALL: range(len(part.tokens))}[
            part.output
        ]
    ]
    assert [step.tokens[row] for row in step.wanted] == wanted
    arrays = {name: array.tolist() for name, array in step.arrays(hidden=False, min_rows=min_rows).items()}
    found = []
    for run, past in enumerate(arrays["past_lens"]):
        first, end = arrays["subsequence_begins"][run : run + 2]
        table = arrays["block_indices"][slice(*arrays["block_indices_begins"][run : run + 2])]
        assert len(table) == block_count(past + end - first)
        assert arrays["max_context_len"] >= past + end - first
        for row in range(first, end):
            position = past + row - first
            assert arrays["position_ids"][row] == position
            found.append((arrays["input_ids"][row], position, table[position // KV_BLOCK]))
    assert found[: len(rows)] == rows
    assert all(block == 0 for _, _, block in found[len(rows) :])
    assert len(found) >= min_rows
    # Without a run of several rows there is one of none.
    lengths = np.diff(arrays["subsequence_begins"])
    assert (lengths != 1).any()
