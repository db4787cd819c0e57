"""LitServe as its documentation serves a language model: OpenAISpec, streaming, and many requests at once by async."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

import litserve

from benchmarks.pace import Recorded, Ticks, parse_arguments

__all__ = ["RecordedAPI"]


class RecordedAPI(litserve.LitAPI):  # type: ignore[misc] # untyped where types are checked: not installed there
    """Says recorded tokens, in LitServe's worker process."""

    def __init__(self, ticks: Ticks, recorded: Recorded) -> None:
        super().__init__(spec=litserve.OpenAISpec(), enable_async=True)
        self._ticks = ticks
        self._recorded = recorded

    def setup(self, device: str) -> None:
        """There is no model to load."""

    async def decode_request(self, request: Any) -> int:
        """How many tokens are wanted."""
        return int(request.max_tokens)

    async def predict(self, tokens: int) -> AsyncIterator[str]:
        """The tokens."""
        for text in itertools.islice(itertools.cycle(self._recorded.texts), tokens):
            await self._ticks.wait()
            yield text


if __name__ == "__main__":
    port, ticks, recorded = parse_arguments(__doc__)
    server = litserve.LitServer(RecordedAPI(ticks, recorded), accelerator="cpu", timeout=False)
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)
