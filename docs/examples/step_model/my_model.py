"""A model of our own, served by furnace."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import furnace
from furnace.checkpoint import open_checkpoint


class TinyLm(nn.Module):
    """A toy: from each token to the scores of the next one."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 64)
        self.head = nn.Linear(64, vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.head(self.embedding(ids))  # [tokens] -> [tokens, vocab]
        return scores


class TorchLm(furnace.StepModel):
    """Runs the network for furnace, one sequence at a time."""

    name = "my-model"
    max_context = 512

    def __init__(self, net: TinyLm) -> None:
        self.net = net

    @property
    def vocab_size(self) -> int:
        return self.net.head.out_features

    def prefill(self, prompt: Sequence[int]) -> tuple[list[int], Tensor]:
        state = list(prompt)  # a real model keeps its KV cache here
        return state, self.next_scores(state)

    def decode(self, state: list[int], token: int) -> Tensor:
        state.append(token)
        return self.next_scores(state)

    @torch.inference_mode()
    def next_scores(self, tokens: list[int]) -> Tensor:
        scores: Tensor = self.net(torch.tensor(tokens))[-1]
        return scores


def engine() -> furnace.Scheduled:
    """The model with its text side: the tokenizer and chat template that it was trained with."""
    with open_checkpoint("tiny-lm") as checkpoint:
        pipeline = furnace.TextPipeline.from_checkpoint(checkpoint)
    torch.manual_seed(0)
    return furnace.Scheduled(TorchLm(TinyLm(pipeline.vocab_size)), pipeline)


if __name__ == "__main__":
    furnace.Server().llm(engine).serve(print)
