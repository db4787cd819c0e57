"""The engine ``acme:demo``. Importing this loads no torch; making the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec

import furnace
from furnace.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["AcmeFactory", "AcmeLm", "AcmeOptions", "furnace_engine"]


class AcmeOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What follows the ``?`` in ``acme:demo?width=128``.

    Attributes:
        width: size of the embeddings.
        seed: of the random weights.
    """

    width: Annotated[int, msgspec.Meta(ge=1)] = 64
    seed: int = 0


class AcmeLm(furnace.StepModel):
    """A toy: from each token to the scores of the next one."""

    name = "acme-demo"

    def __init__(self, vocab_size: int, max_context: int, options: AcmeOptions) -> None:
        import torch

        self._torch = torch
        self._vocab_size = vocab_size
        self._max_context = max_context
        torch.manual_seed(options.seed)
        self._net = torch.nn.Sequential(
            torch.nn.Embedding(vocab_size, options.width), torch.nn.Linear(options.width, vocab_size)
        ).requires_grad_(False)

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def prefill(self, prompt: Sequence[int]) -> tuple[list[int], Tensor]:
        state = list(prompt)
        return state, self._next_scores(state)

    def decode(self, state: list[int], token: int) -> Tensor:
        state.append(token)
        return self._next_scores(state)

    def _next_scores(self, tokens: list[int]) -> Tensor:
        scores: Tensor = self._net(self._torch.tensor(tokens))[-1]
        return scores


class AcmeFactory(furnace.EngineFactory[AcmeOptions]):
    """Makes the engines of the scheme ``acme``."""

    api_version = 1
    options = AcmeOptions

    def create(self, model: str, options: AcmeOptions, context: furnace.EngineContext) -> furnace.LlmEngine:
        """Load ``demo``, the only model there is."""
        if model != "demo":
            raise ValueError(f"there is no model {model!r}; there is 'demo'")
        with open_checkpoint("tiny-lm") as checkpoint:  # for its tokenizer and chat template
            pipeline = furnace.TextPipeline.from_checkpoint(checkpoint, chat_template=context.chat_template)
        return furnace.Scheduled(AcmeLm(pipeline.vocab_size, context.max_context or 512, options), pipeline)


@furnace.hookimpl
def furnace_engine() -> AcmeFactory:
    """Give furnace the factory."""
    return AcmeFactory()
