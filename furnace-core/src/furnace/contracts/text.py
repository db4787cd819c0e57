"""Optional interfaces of an engine, each declared in its ``Capabilities``."""

from __future__ import annotations

import abc

from furnace.contracts.request import Input

__all__ = ["EmbeddingEngine", "TextService"]


class TextService(abc.ABC):
    """Tokenizing without generating; declared by ``Capabilities.tokenize``."""

    @abc.abstractmethod
    async def tokenize(self, input: Input) -> list[int]:
        """The token ids that ``generate`` would start from.

        Called on the event loop; must not block it.

        Raises:
            InvalidRequestError: the input can't be rendered or encoded.
        """

    @abc.abstractmethod
    async def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids, control tokens left out.

        Raises:
            InvalidRequestError: an id is outside the vocabulary.
        """

    async def count(self, input: Input) -> int:
        """How many prompt tokens ``generate`` would count."""
        return len(await self.tokenize(input))


class EmbeddingEngine(abc.ABC):
    """Vectors for texts; declared by ``Capabilities.embeddings``."""

    @property
    @abc.abstractmethod
    def dimensions(self) -> int:
        """Length of a vector."""

    @abc.abstractmethod
    async def embed(self, inputs: list[Input]) -> list[list[float]]:
        """One float32 vector per input, in order.

        Called on the event loop; must not block it.

        Raises:
            EngineError: as ``LlmEngine.generate``.
        """
