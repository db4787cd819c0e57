"""A request while furnace runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from furnace.contracts import (
    Finished,
    FinishReason,
    GenerateRequest,
    Row,
    Started,
    Text,
    Usage,
)
from furnace.runtime.handoff import Handoff, Mailbox
from furnace.runtime.text_output import TextOutput
from furnace.scheduler import Sequence as ScheduledSequence

__all__ = ["Job"]


class Job:
    """Everything that belongs to one sequence: its request, its place in the scheduler, its model state, its output.

    Built before admission, then touched by the model thread only; the counts behind ``usage`` may be read anywhere.

    Args:
        sequence: its prompt and progress.
        request: as it was admitted.
        seed: the client's, or one drawn for all choices of the request.
        max_tokens: most tokens to generate.
        end_tokens: the model's.
        output: text side of it.
        mailbox: where its events go.
        in_reasoning: the prompt ended inside a reasoning section.
        key: what a heartbeat calls it; 0 for nothing.

    Attributes:
        begun: it has left the queue and its client knows.
    """

    __slots__ = (
        "_counts",
        "_end_tokens",
        "_in_reasoning",
        "_stop_tokens",
        "_unsent",
        "begun",
        "key",
        "mailbox",
        "max_tokens",
        "output",
        "request",
        "row",
        "sequence",
    )

    def __init__(
        self,
        sequence: ScheduledSequence,
        request: GenerateRequest,
        *,
        seed: int,
        max_tokens: int,
        end_tokens: frozenset[int],
        output: TextOutput,
        mailbox: Mailbox,
        in_reasoning: bool,
        key: int = 0,
    ) -> None:
        params = request.params
        self.sequence = sequence
        self.request = request
        self.max_tokens = max_tokens
        self.output = output
        self.mailbox = mailbox
        self.key = key
        self.begun = False
        self._in_reasoning = in_reasoning
        self._unsent: list[int] = []
        self._stop_tokens = frozenset(params.stop_token_ids)
        self._end_tokens = end_tokens
        repeats = params.repetition_penalty != 1.0
        counted = repeats or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self._counts: Counter[int] | None = Counter() if counted else None
        self.row = Row(
            params=params,
            seed=seed,
            choice=request.choice,
            position=0,
            prompt_counts=Counter(sequence.prompt) if repeats else {},
            counts={} if self._counts is None else self._counts,
            end_tokens=end_tokens,
        )

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        sequence = self.sequence
        return Usage(
            prompt_tokens=len(sequence.prompt),
            completion_tokens=len(sequence.generated),
            cached_tokens=sequence.cached,
        )

    def start(self, handoff: Handoff) -> None:
        """It has left the queue."""
        self.begun = True
        started = Started(
            prompt_tokens=len(self.sequence.prompt),
            cached_tokens=self.sequence.cached,
            in_reasoning=self._in_reasoning,
        )
        handoff.add(self.mailbox, started)

    def rows(self, drafts: Sequence[int]) -> list[Row]:
        """What the sampler must know of the next token, and of each one behind a draft if all drafts so far are right.

        Args:
            drafts: may come next.
        """
        rows = [self.row]
        for index in range(1, len(drafts) + 1):
            counts = self.row.counts if self._counts is None else self._counts + Counter(drafts[:index])
            rows.append(msgspec.structs.replace(self.row, position=self.row.position + index, counts=counts))
        return rows

    def take(self, token: int, handoff: Handoff) -> bool:
        """Its next token was picked and is already the last of ``sequence.generated``.

        Returns:
            Whether that was its last.
        """
        self._unsent.append(token)
        self.row.position += 1
        if self._counts is not None:
            self._counts[token] += 1
        if token in self._end_tokens or token in self._stop_tokens:
            self._finish(handoff, FinishReason.STOP, "", matched=token)
            return True
        text = self.output.push(token)
        if self.output.matched is not None:
            self._finish(handoff, FinishReason.STOP, text, matched=self.output.matched)
            return True
        if len(self.sequence.generated) >= self.max_tokens:
            self._finish(handoff, FinishReason.LENGTH, text)
            return True
        if text:
            handoff.add(self.mailbox, Text(text, self._unsent))
            self._unsent = []
        return False

    def _finish(self, handoff: Handoff, reason: FinishReason, text: str, *, matched: str | int | None = None) -> None:
        text += self.output.flush()
        if self.output.matched is not None and matched is None:
            # The last, unfinished character completed a stop string.
            reason, matched = FinishReason.STOP, self.output.matched
        handoff.add(self.mailbox, Text(text, self._unsent))
        handoff.add(self.mailbox, Finished(reason, self.usage, matched))
