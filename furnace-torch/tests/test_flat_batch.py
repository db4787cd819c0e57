from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from furnace.contracts import Chunk, ChunkKind, Output
from furnace_torch.flat_batch import DecodeGroup, PrefillSegment, arrange
from furnace_torch.kv_store import Slot


def decode(slot: int, position: int, count: int = 1) -> Chunk:
    return Chunk(Slot(slot, position), list(range(count)), position, ChunkKind.DECODE, Output.ALL)


def prefill(slot: int, position: int, count: int, output: Output = Output.LAST) -> Chunk:
    return Chunk(Slot(slot, position), list(range(count)), position, ChunkKind.PREFILL, output)


def test_decode_rows_of_neighbouring_slots_and_equal_padding_form_a_group() -> None:
    flat = arrange([decode(2, 10), decode(0, 63), decode(1, 0), decode(5, 5), decode(3, 64)])
    assert flat.decode == [DecodeGroup(0, 3, 0, 64), DecodeGroup(3, 1, 5, 64), DecodeGroup(4, 1, 3, 128)]
    assert flat.slots == [0, 1, 2, 5, 3]
    assert flat.positions == [63, 0, 10, 5, 64]
    assert flat.outputs == [2, 0, 1, 3, 4]


def test_prefill_is_cut_on_the_grid_wherever_it_begins() -> None:
    flat = arrange([prefill(1, 120, 150)])
    assert flat.prefill == [
        PrefillSegment(0, 8, 1, 120),
        PrefillSegment(8, 128, 1, 128),
        PrefillSegment(136, 14, 1, 256),
    ]
    assert flat.outputs == [149]


chunks = st.lists(
    st.tuples(
        st.sampled_from(ChunkKind),
        st.integers(0, 400),
        st.integers(1, 300),
        st.sampled_from([Output.NONE, Output.LAST, Output.ALL]),
    ),
    max_size=12,
)


@given(chunks)
def test_every_token_is_in_exactly_one_group_or_segment_and_outputs_are_in_order(
    parts: list[tuple[ChunkKind, int, int, Output]],
) -> None:
    batch = []
    for slot, (kind, position, size, output) in enumerate(parts):
        count = size if kind is ChunkKind.PREFILL else 1 + size % 16
        tokens = [1000 * slot + i for i in range(count)]
        batch.append(Chunk(Slot(slot, position), tokens, position, kind, output))
    flat = arrange(batch)
    covered = [row for group in flat.decode for row in range(group.first_row, group.first_row + group.rows)]
    covered += [row for part in flat.prefill for row in range(part.first_row, part.first_row + part.rows)]
    assert covered == list(range(len(flat.tokens)))
    for group in flat.decode:
        for offset in range(group.rows):
            assert flat.slots[group.first_row + offset] == group.first_slot + offset
            assert 0 <= flat.positions[group.first_row + offset] < group.padded
    expected = {
        (chunk.state.index, chunk.position + i): token for chunk in batch for i, token in enumerate(chunk.tokens)
    }
    found = dict(zip(zip(flat.slots, flat.positions, strict=True), flat.tokens, strict=True))
    assert found == expected
    wanted = [
        token
        for chunk in batch
        for token in {Output.NONE: [], Output.LAST: chunk.tokens[-1:], Output.ALL: chunk.tokens}[chunk.output]
    ]
    assert [flat.tokens[row] for row in flat.outputs] == wanted
