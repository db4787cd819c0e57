from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from furnace.contracts import OutOfKvError
from furnace_openvino.blocks import KV_BLOCK, BlockAllocator, BlockTable, Copy, block_count

BLOCKS, TABLES = 12, 5


class Tables(RuleBasedStateMachine):
    """Random calls beside a simple model: each table's tokens, and a cache in which every token is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS, TABLES)
        self.tokens: dict[BlockTable, list[int]] = {}
        self.cache = [[-1] * KV_BLOCK for _ in range(BLOCKS + 1)]
        self.next_token = 0

    def copy(self, copies: list[Copy]) -> None:
        for source, target in copies:
            self.cache[target] = list(self.cache[source])

    def snapshot(self) -> object:
        tables = {table: (list(table.blocks), table.length) for table in self.tokens}
        return self.allocator.used, self.allocator.opened, tables

    def chosen(self, data: st.DataObject) -> BlockTable:
        return data.draw(st.sampled_from(list(self.tokens)), "table")

    @rule()
    def open(self) -> None:
        if len(self.tokens) < TABLES:
            self.tokens[self.allocator.open()] = []
            return
        with pytest.raises(OutOfKvError, match="all 5 sequences are open"):
            self.allocator.open()

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(list(self.tokens)), min_size=1, unique=True), "tables")
        more = [(table, table.length + data.draw(st.integers(1, 80), "more")) for table in chosen]
        before = self.snapshot()
        try:
            self.copy(self.allocator.grow(more))
        except OutOfKvError:
            assert self.snapshot() == before
            # A cut block that is shared costs one more.
            most = sum(block_count(length) - len(table.blocks) + 1 for table, length in more)
            assert self.allocator.used + most > BLOCKS
            return
        for table, length in more:
            for position in range(len(self.tokens[table]), length):
                self.cache[table.blocks[position // KV_BLOCK]][position % KV_BLOCK] = self.next_token
                self.tokens[table].append(self.next_token)
                self.next_token += 1

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        source = self.chosen(data)
        length = data.draw(st.integers(0, source.length), "length")
        before = self.snapshot()
        try:
            table, copies = self.allocator.fork(source, length)
        except OutOfKvError:
            assert self.snapshot() == before
            assert len(self.tokens) == TABLES or (length % KV_BLOCK and self.allocator.used == BLOCKS)
            return
        assert self.allocator.used == before[0] + (length % KV_BLOCK > 0)  # type: ignore[index] # a tuple
        assert table.blocks[: length // KV_BLOCK] == source.blocks[: length // KV_BLOCK]
        self.copy(copies)
        self.tokens[table] = self.tokens[source][:length]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        table = self.chosen(data)
        length = data.draw(st.integers(0, table.length), "length")
        self.forget(self.allocator.shrink(table, length))
        del self.tokens[table][length:]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.chosen(data)
        del self.tokens[table]
        self.forget(self.allocator.release(table))
        assert not table.is_open

    def forget(self, freed: list[int]) -> None:
        for block in freed:
            self.cache[block] = [-1] * KV_BLOCK

    @invariant()
    def every_table_reads_its_own_tokens(self) -> None:
        for table, tokens in self.tokens.items():
            assert table.length == len(tokens)
            assert len(table.blocks) == block_count(len(tokens))
            read = [token for block in table.blocks for token in self.cache[block]]
            assert read[: len(tokens)] == tokens

    @invariant()
    def used_blocks_are_those_of_the_open_tables(self) -> None:
        held = {block for table in self.tokens for block in table.blocks}
        assert self.allocator.used == len(held)
        assert held <= set(range(1, BLOCKS + 1))
        assert self.allocator.opened == len(self.tokens)


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase


def test_the_lowest_free_blocks_are_given_out_first() -> None:
    allocator = BlockAllocator(8, 4)
    first, second = allocator.open(), allocator.open()
    allocator.grow([(first, 3 * KV_BLOCK)])
    allocator.grow([(second, 2 * KV_BLOCK)])
    assert allocator.release(first) == [1, 2, 3]
    allocator.grow([(second, 4 * KV_BLOCK)])
    assert second.blocks == [4, 5, 1, 2]


def test_a_shared_block_that_was_cut_is_copied_before_it_is_written() -> None:
    allocator = BlockAllocator(8, 4)
    origin = allocator.open()
    allocator.grow([(origin, 64)])
    fork, copies = allocator.fork(origin, 64)
    assert copies == []
    assert allocator.used == 2
    allocator.shrink(origin, 40)
    assert allocator.grow([(origin, 41)]) == [(2, 3)]
    assert (origin.blocks, fork.blocks) == ([1, 3], [1, 2])


def test_when_all_that_share_a_cut_block_grow_in_one_call_the_last_one_keeps_it() -> None:
    allocator = BlockAllocator(8, 4)
    tables = [allocator.open()]
    allocator.grow([(tables[0], 32)])
    tables += [allocator.fork(tables[0], 32)[0] for _ in range(2)]
    for table in tables:
        allocator.shrink(table, 10)
    copies = allocator.grow([(table, 11) for table in tables])
    assert copies == [(1, 2), (1, 3)]
    assert [table.blocks for table in tables] == [[2], [3], [1]]


@given(st.lists(st.integers(0, 400), max_size=6))
def test_block_counts_rise_with_length_one_block_at_a_time(lengths: list[int]) -> None:
    for length in lengths:
        assert (block_count(length) - 1) * KV_BLOCK < length <= block_count(length) * KV_BLOCK or length == 0
    assert all(block_count(a) <= block_count(b) for a, b in pairwise(sorted(lengths)))
