"""What has to be known of a server before it is measured: its model, what it accepts, how it counts."""

from __future__ import annotations

import msgspec

from furnace.bench.client import Client
from furnace.bench.errors import TargetError
from furnace.bench.plan import Plan
from furnace.bench.prompts import WORDS, Prompts, PromptScale, Request
from furnace.bench.sample import UNREACHABLE, Sample

__all__ = ["Calibration", "calibrate"]

FEW_WORDS, MANY_WORDS = 4, 36


class Calibration(msgspec.Struct, frozen=True):
    """What was found out.

    Attributes:
        scale: tokens of words.
        counts: the server says how many tokens it took and gave.
    """

    scale: PromptScale
    counts: bool


async def calibrate(client: Client, plan: Plan) -> Calibration:
    """Choose the client's model, drop what the server refuses, and ask it how many tokens some prompts are.

    Raises:
        TargetError: the server can't be reached, or refuses the requests.
    """
    if not client.model:
        client.model = await _only_model(client)
    few = await _ask(client, FEW_WORDS, plan)
    many = await _ask(client, MANY_WORDS, plan)
    if not (few.counted and many.counted):
        return Calibration(PromptScale(), counts=False)
    scale = PromptScale.measured((FEW_WORDS, few.prompt_tokens), (MANY_WORDS, many.prompt_tokens))
    # Some tokenizers know some of the words only, and the average of a few says little. More than the prompts that are
    # asked for may not fit into the model's context.
    most_words = min(scale.words(plan.prompt.high), len(WORDS))
    if most_words > MANY_WORDS:
        most = await _ask(client, most_words, plan)
        scale = PromptScale.measured((FEW_WORDS, few.prompt_tokens), (most_words, most.prompt_tokens))
    return Calibration(scale, counts=True)


async def _only_model(client: Client) -> str:
    models = await client.models()
    if not models:
        raise TargetError(f"{client.url} lists no model; name one with --model")
    if len(models) > 1:
        raise TargetError(f"{client.url} has several models, name one with --model: {', '.join(models[:20])}")
    return models[0]


async def _ask(client: Client, words: int, plan: Plan) -> Sample:
    """Send a prompt of so many words; a refused parameter that can be spared is dropped from then on."""
    prompt = Prompts.of_words(words, seed=plan.seed)
    while True:
        sample = await client.send(Request(prompt, output_tokens=2))
        if sample.failure is None:
            return sample
        if sample.failure == UNREACHABLE:
            raise TargetError(f"{client.url} can't be reached: {sample.message}")
        if sample.failure == "400" and client.limit_field == "max_tokens" and "max_completion_tokens" in sample.message:
            client.limit_field = "max_completion_tokens"
        elif sample.failure in ("400", "422") and client.ignore_eos:
            client.ignore_eos = False
        else:
            raise TargetError(
                f"{client.url} refuses a request for {client.model!r}: {sample.failure}: {sample.message}"
            )
