"""Random schedules: what a scheduler may do with a model, written down so that it can be replayed and made smaller."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from furnace.contracts import ChunkKind, Limits, Output, StepCapabilities

__all__ = ["Cut", "Fork", "Op", "Open", "Part", "Release", "Work", "draw_schedule", "smaller"]


@dataclass(frozen=True)
class Open:
    """Open a state in a slot; nothing if there is one."""

    slot: int
    stream: int
    """Which tokens it will read."""


@dataclass(frozen=True)
class Part:
    """A chunk of a step."""

    slot: int
    kind: ChunkKind
    amount: int
    output: Output


@dataclass(frozen=True)
class Work:
    """One step; parts that make no sense are left out."""

    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Fork:
    """Fork a state into a slot; what is there is released first."""

    source: int
    slot: int
    length: int
    stream: int


@dataclass(frozen=True)
class Cut:
    """Truncate a state."""

    slot: int
    length: int


@dataclass(frozen=True)
class Release:
    """Release a state."""

    slot: int


Op: TypeAlias = Open | Work | Fork | Cut | Release


def draw_schedule(
    draw: random.Random, limits: Limits, can: StepCapabilities, *, slots: int, longest: int, count: int
) -> list[Op]:
    """A random schedule.

    Args:
        draw: makes it.
        limits: of the model.
        can: what the model declares.
        slots: most states at once.
        longest: tokens that a sequence may get, roughly.
        count: of operations.
    """
    kinds = ["work"] * 10 + ["open"] * 3 + ["release"] * 2
    kinds += ["fork"] * 5 if can.prefix_reuse else []
    kinds += ["cut"] * 2 if can.rewind else []
    schedule: list[Op] = [Open(0, 0)]
    for number in range(1, count):
        slot = draw.randrange(slots)
        match draw.choice(kinds):
            case "open":
                schedule.append(Open(slot, number))
            case "release":
                schedule.append(Release(slot))
            case "fork":
                schedule.append(Fork(slot, draw.randrange(slots), _length(draw, limits.grid, longest), number))
            case "cut":
                schedule.append(Cut(slot, _length(draw, limits.grid, longest)))
            case _:
                order = draw.sample(range(slots), draw.randint(1, slots))
                schedule.append(Work(tuple(_draw_part(draw, each, limits, can, longest) for each in order)))
    return schedule


def _draw_part(draw: random.Random, slot: int, limits: Limits, can: StepCapabilities, longest: int) -> Part:
    output = draw.choice(
        [Output.LAST, Output.LAST, Output.LAST, Output.NONE, Output.ALL if can.all_logits else Output.LAST]
    )
    if draw.random() < 0.5:
        return Part(slot, ChunkKind.PREFILL, max(1, _length(draw, limits.grid, longest // 2)), output)
    amount = 1 if draw.random() < 0.7 else draw.randint(1, min(limits.max_decode_tokens, 8))
    return Part(slot, ChunkKind.DECODE, amount, output)


def _length(draw: random.Random, grid: int, longest: int) -> int:
    """A length, often near the grid, where mistakes are."""
    if draw.random() < 0.5:
        return max(0, min(longest, draw.randint(0, max(1, longest // grid)) * grid + draw.choice((0, 0, 0, -1, 1, 2))))
    return draw.randint(0, longest)


def smaller(schedule: Sequence[Op]) -> list[list[Op]]:
    """Schedules that are a little simpler, the boldest first."""
    ops = list(schedule)
    found: list[list[Op]] = []
    size = len(ops) // 2
    while size:
        found += [ops[:start] + ops[start + size :] for start in range(0, len(ops), size)]
        size //= 2
    for place, op in enumerate(ops):
        found += [[*ops[:place], simpler, *ops[place + 1 :]] for simpler in _simpler(op)]
    return found


def _simpler(op: Op) -> list[Op]:
    match op:
        case Work(parts):
            fewer: list[Op] = []
            if len(parts) > 1:
                fewer = [Work(parts[:place] + parts[place + 1 :]) for place in range(len(parts))]
            for place, part in enumerate(parts):
                for amount in _less(part.amount, 1):
                    fewer.append(Work((*parts[:place], replace(part, amount=amount), *parts[place + 1 :])))
                if part.output is not Output.LAST:
                    fewer.append(Work((*parts[:place], replace(part, output=Output.LAST), *parts[place + 1 :])))
            return fewer
        case Fork():
            return [Open(op.slot, op.stream), *(replace(op, length=length) for length in _less(op.length, 0))]
        case Cut():
            return [replace(op, length=length) for length in _less(op.length, 0)]
        case _:
            return []


def _less(value: int, least: int) -> list[int]:
    """Smaller numbers, the smallest first."""
    return [number for number in dict.fromkeys((least, least + 1, value // 2, value - 1)) if least <= number < value]
