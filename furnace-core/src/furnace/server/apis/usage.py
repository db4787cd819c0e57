"""Token counts, as the APIs show them."""

from __future__ import annotations

import msgspec

from furnace.contracts import Usage

__all__ = ["UsageBody", "usage_body"]


class PromptDetails(msgspec.Struct, frozen=True):
    """Of the prompt's tokens.

    Attributes:
        cached_tokens: how many came from the prefix cache.
    """

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Of the generated tokens.

    Attributes:
        reasoning_tokens: how many were reasoning.
    """

    reasoning_tokens: int


class UsageBody(msgspec.Struct, frozen=True):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_body(usage: Usage) -> UsageBody:
    """The counts in the APIs' shape."""
    return UsageBody(
        usage.prompt_tokens,
        usage.completion_tokens,
        usage.total_tokens,
        PromptDetails(usage.cached_tokens),
        CompletionDetails(usage.reasoning_tokens),
    )
