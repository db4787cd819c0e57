"""``BatchStepModel``s that fork or truncate wrongly."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from furnace.contracts import ForkKind
from furnace.testing.wrong.little_batch import LittleBatchModel, LittleSequence
from furnace.testing.wrong.registry import caught_by

__all__: list[str] = []


@caught_by("test_a_fork_goes_on_as_its_origin_would")
class ForkIgnoresLength(LittleBatchModel):
    """Forks all tokens of a sequence, whatever length was asked for."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        return super().fork(state, state.length)


@caught_by("test_a_fork_goes_on_as_its_origin_would")
class ForkKeepsMoreThanItSays(LittleBatchModel):
    """Forks all tokens of a sequence, and says that it kept those that were asked for."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child, _ = super().fork(state, state.length)
        return child, length


@caught_by("test_a_fork_goes_on_as_its_origin_would")
class ForkKeepsLessThanItSays(LittleBatchModel):
    """Forks whole blocks only, but says that it kept all."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child, _ = super().fork(state, length // self.kv.block * self.kv.block)
        return child, length


@caught_by("test_a_fork_of_the_whole_prompt_decodes_as_its_origin")
class ForkAliases(LittleBatchModel):
    """Shares the cut block with the child, which then writes into its parent."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child = LittleSequence()
        child.blocks, child.length = state.blocks[: self.kv.needed(length)], length
        self.kv.share(child.blocks)
        return child, length

    def ends_in_shared(self, state: LittleSequence) -> bool:
        return False


@caught_by("test_a_released_fork_leaves_its_origin_alone")
class ForkMoves(LittleBatchModel):
    """Takes the tokens away from the parent."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child, kept = super().fork(state, length)
        self.truncate(state, 0)
        return child, kept


@caught_by("test_a_fork_outlives_its_origin")
class ForkDiesWithItsParent(LittleBatchModel):
    """Loses the child's tokens when the parent is released."""

    def release(self, state: LittleSequence) -> None:
        self.kv.entries[state.blocks] = 0
        super().release(state)


@caught_by("test_a_fork_of_nothing_is_an_empty_state")
class ForkOfNothing(LittleBatchModel):
    """Takes a length of 0 for all tokens."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child, _ = super().fork(state, length or state.length)
        return child, length


@caught_by("test_no_schedule_changes_a_row")
class ForkSharesACutBlock(LittleBatchModel):
    """Shares the cut block with the child if only one token of it is missing."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        if (length + 1) % self.kv.block or length == state.length:
            return super().fork(state, length)
        child = LittleSequence()
        child.blocks, child.length = state.blocks[: self.kv.needed(length)], length
        self.kv.share(child.blocks)
        return child, length

    def ends_in_shared(self, state: LittleSequence) -> bool:
        return False


@caught_by("test_a_fork_at_the_end_of_a_block_shares_no_more")
class ForkSharesTheNextBlock(LittleBatchModel):
    """Shares a block too many when the length is a multiple of a block, and the child writes into it."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child, kept = super().fork(state, length)
        if length and length % self.kv.block == 0:
            following = state.blocks[len(child.blocks) :][:1]
            self.kv.share(following)
            child.blocks += following
        return child, kept


@caught_by("test_a_fork_outlives_its_origin")
class ForkIsItsParent(LittleBatchModel):
    """Returns the parent for a fork of all that it holds."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        return (state, length) if length == state.length else super().fork(state, length)


@caught_by("test_a_fork_of_a_fork_holds_what_both_share")
class ForkOfForkIsEmpty(LittleBatchModel):
    """Copies nothing into the fork of a fork."""

    def __init__(self) -> None:
        super().__init__()
        self._forks: set[int] = set()

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child, kept = super().fork(state, length)
        if id(state) in self._forks:
            child.blocks, mine = self.kv.take(len(child.blocks)), child.blocks
            self.kv.give_back(mine)
        self._forks.add(id(child))
        return child, kept

    def release(self, state: LittleSequence) -> None:
        self._forks.discard(id(state))
        super().release(state)


@caught_by("test_a_fork_of_a_fork_outlives_both")
class BorrowedBlocksNotCounted(LittleBatchModel):
    """Does not count the fork of a fork as a holder of the blocks that the fork had borrowed."""

    def __init__(self) -> None:
        super().__init__()
        self._borrowed: WeakKeyDictionary[LittleSequence, int] = WeakKeyDictionary()

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child, kept = super().fork(state, length)
        whole = kept // self.kv.block
        self.kv.give_back(child.blocks[: min(whole, self._borrowed.get(state, 0))])
        self._borrowed[child] = whole
        return child, kept


@caught_by("test_a_fork_without_room_raises_out_of_kv_and_changes_nothing")
class ForkLeaksWhenFull(LittleBatchModel):
    """Holds the parent's blocks for ever when a fork found no room."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        whole = length // self.kv.block
        self.kv.share(state.blocks[:whole])
        child, kept = super().fork(state, length)
        self.kv.give_back(state.blocks[:whole])
        return child, kept


@caught_by("test_released_states_leave_no_kv_behind")
class ForkLeaks(LittleBatchModel):
    """Counts one holder too many for every shared block."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        self.kv.share(state.blocks[: length // self.kv.block])
        return super().fork(state, length)


@caught_by("test_a_fork_without_room_raises_out_of_kv_and_changes_nothing")
class ForkSharesNothing(LittleBatchModel):
    """Declares that it shares whole blocks, but copies all, so that the KV cache is full early."""

    def fork(self, state: LittleSequence, length: int) -> tuple[LittleSequence, int]:
        child = LittleSequence()
        child.blocks, child.length = self.kv.take(self.kv.needed(length)), length
        self.kv.copy(state.blocks[: len(child.blocks)], child.blocks)
        return child, length


@caught_by("test_limits_and_capabilities_agree")
class ForkIsNotThere(LittleBatchModel):
    """Declares prefix reuse, but its limits say that it can't fork."""

    def __init__(self) -> None:
        super().__init__(limits={"fork": ForkKind.NONE})


@caught_by("test_a_cut_state_goes_on_as_if_it_had_never_been_longer")
class TruncateForgetsNothing(LittleBatchModel):
    """Keeps all tokens when it is told to forget some."""

    def truncate(self, state: LittleSequence, length: int) -> None:
        pass


@caught_by("test_a_cut_state_goes_on_as_if_it_had_never_been_longer")
class TruncateOffByOne(LittleBatchModel):
    """Forgets one token less than it is told to."""

    def truncate(self, state: LittleSequence, length: int) -> None:
        super().truncate(state, min(length + 1, state.length))


@caught_by("test_cutting_a_fork_leaves_its_origin_alone")
class TruncateSpoilsTheLast(LittleBatchModel):
    """Clears the entry of the last token that it should keep."""

    def truncate(self, state: LittleSequence, length: int) -> None:
        super().truncate(state, length)
        if length:
            self.kv.write(state.blocks, length - 1, self.lm.entry(0, 0) * 0)


@caught_by("test_released_states_leave_no_kv_behind")
class TruncateKeepsBlocks(LittleBatchModel):
    """Forgets the blocks of truncated tokens without giving them back."""

    def truncate(self, state: LittleSequence, length: int) -> None:
        del state.blocks[self.kv.needed(length) :]
        state.length = length


@caught_by("test_cutting_an_origin_leaves_its_fork_alone")
class TruncateSpoilsForks(LittleBatchModel):
    """Writes behind a truncation into blocks that a fork still shares."""

    def ends_in_shared(self, state: LittleSequence) -> bool:
        return False


@caught_by("test_blocks_that_are_cut_stay_with_those_who_share_them")
class TruncateFreesSharedBlocks(LittleBatchModel):
    """Gives the blocks behind a truncation to the next sequence, though a fork still shares them."""

    def truncate(self, state: LittleSequence, length: int) -> None:
        for block in state.blocks[self.kv.needed(length) :]:
            if self.kv.is_shared(block):
                self.kv.free.append(block)
        super().truncate(state, length)


@caught_by("test_a_state_can_be_cut_inside_its_prompt_and_to_nothing")
class TruncateIsNotThere(LittleBatchModel):
    """Declares rewind, but can't truncate."""

    def truncate(self, state: LittleSequence, length: int) -> None:
        raise NotImplementedError("truncate")
