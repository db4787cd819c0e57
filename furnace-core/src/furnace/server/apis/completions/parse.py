"""From a completion request to requests for the engine."""

from __future__ import annotations

from furnace.contracts import Capabilities, GenerateRequest, Input, PromptTooLongError, TextInput, TokenInput
from furnace.contracts.sampling_bounds import check_token_ids
from furnace.server.apis.completions.types import CompletionRequest
from furnace.server.apis.decoding import BodyDecoder, check_text
from furnace.server.apis.sampling import LARGEST_CHOICES, parse_sampling, parse_stop, refuse
from furnace.server.errors import ApiError

__all__ = ["decode_completion", "parse_completion"]

DEFAULT_MAX_TOKENS = 16
LARGEST_LOGPROBS = 5
MOST_PROMPTS = 2048

decode_completion = BodyDecoder(CompletionRequest)


def parse_completion(body: CompletionRequest, capabilities: Capabilities, max_context: int) -> list[GenerateRequest]:
    """Check a completion request; one request for the engine for each prompt.

    Raises:
        ApiError: 400, a value can't be served; ``param`` names it.
        InvalidRequestError: the same, of a value that the contract bounds.
        PromptTooLongError: there are more token ids than the context holds.
    """
    if not capabilities.completions:
        raise ApiError.unsupported("This model does not complete raw text; use /v1/chat/completions.", "prompt")
    _refuse_unserved(body)
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = parse_sampling(body, capabilities, limit, "max_tokens")
    stop = parse_stop(body.stop, capabilities)
    return [
        GenerateRequest(input=prompt, params=params, stop=stop)
        for prompt in _parse_prompts(body.prompt, capabilities.vocab_size, max_context)
    ]


def _refuse_unserved(body: CompletionRequest) -> None:
    refuse(body.suffix, "suffix", "")
    if body.best_of is not None and not 1 <= body.best_of <= LARGEST_CHOICES:
        message = f"Invalid value for 'best_of': it must be between 1 and {LARGEST_CHOICES}."
        raise ApiError.invalid(message, "best_of")
    refuse(body.best_of, "best_of", 1)
    if body.logprobs is not None and not 0 <= body.logprobs <= LARGEST_LOGPROBS:
        message = f"Invalid value for 'logprobs': it must be between 0 and {LARGEST_LOGPROBS}."
        raise ApiError.invalid(message, "logprobs")
    refuse(body.logprobs, "logprobs")
    if body.response_format is not None and body.response_format.get("type") != "text":
        raise ApiError.unsupported("'response_format' is only supported with type 'text'.", "response_format")


def _parse_prompts(prompt: str | list[str | int | list[int]], vocab_size: int | None, max_context: int) -> list[Input]:
    if isinstance(prompt, str):
        return [TextInput(check_text(prompt, "prompt"))]
    if not prompt:
        raise ApiError.invalid("'prompt' is empty.", "prompt")
    if isinstance(prompt[0], int) and len(prompt) > max_context:
        # Told before a million of them are looked at.
        raise PromptTooLongError(len(prompt), max_context, param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [_tokens([item for item in prompt if isinstance(item, int)], "prompt", vocab_size)]
    if len(prompt) > MOST_PROMPTS:
        raise ApiError.invalid(f"'prompt' may hold at most {MOST_PROMPTS} prompts.", "prompt")
    kinds = {type(item) for item in prompt}
    if len(kinds) > 1:
        raise ApiError.invalid("'prompt' must hold texts only, token ids only, or lists of token ids only.", "prompt")
    return [_parse_prompt(item, f"prompt[{index}]", vocab_size) for index, item in enumerate(prompt)]


def _parse_prompt(prompt: str | int | list[int], param: str, vocab_size: int | None) -> Input:
    if isinstance(prompt, str):
        return TextInput(check_text(prompt, param))
    if not isinstance(prompt, list) or not prompt:
        raise ApiError.invalid(f"'{param}' is empty.", param)
    return _tokens(prompt, param, vocab_size)


def _tokens(ids: list[int], param: str, vocab_size: int | None) -> TokenInput:
    check_token_ids(ids, vocab_size, param)
    return TokenInput(ids)
