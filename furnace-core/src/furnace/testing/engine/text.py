"""The text of the output: whole characters, stop strings, end tokens, and the tokenizer beside it."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from furnace.contracts import (
    ChatInput,
    Finished,
    FinishReason,
    GenerateRequest,
    InvalidRequestError,
    LlmEngine,
    Message,
    SamplingParams,
    TextInput,
    TokenInput,
    UnsupportedError,
)
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Answer, Client
from furnace.testing.verdict import Inapplicable, refused, require

__all__ = ["TextChecks", "end_token", "long_answer"]

# Output tokens within which a model that ends by itself has ended; a whole context takes a slow one minutes.
_TO_THE_END = 200

_long_answers: WeakKeyDictionary[LlmEngine, Answer] = WeakKeyDictionary()


class TextChecks(Conformance):
    """From tokens to text, and where it ends."""

    @engine_check
    async def test_a_stop_string_ends_the_output_and_is_not_in_it(self, client: Client) -> None:
        """Strings out of the model's own answer, some over the borders of tokens."""
        request, whole = await long_answer(client)
        for stop in _stop_strings(whole):
            answer = await client.answer(client.ask(request, max_tokens=64, stop=[stop]))
            shown = whole.text[: whole.text.index(stop)]
            last = answer.finished
            require(
                answer.text == shown,
                f"with stop={stop!r} the text is {answer.text!r}, but it should be {shown!r}: the output "
                f"{whole.text!r} up to the stop string. Search the text of all tokens together, and hold back what "
                "may become a stop string.",
            )
            require(
                (last.reason, last.matched) == (FinishReason.STOP, stop),
                f"output that ended at stop={stop!r} says reason={last.reason.value}, matched={last.matched!r}. It is "
                "stop, and matched is the string.",
            )
            require(
                answer.usage.completion_tokens <= whole.usage.completion_tokens,
                "a stop string made the output longer: end it at the token that completes the string",
            )
        await client.settle()

    @engine_check
    async def test_a_stop_string_that_never_comes_changes_nothing(self, client: Client) -> None:
        """Text that was held back for a stop string comes out at the end."""
        request, whole = await long_answer(client)
        text = whole.text
        almost = [text[-3:] + "\u2603", text[len(text) // 4 :][:24] + "\u2603", "\u2603"][: client.can.max_stop_strings]
        answer = await client.answer(client.ask(request, max_tokens=64, stop=almost))
        require(
            answer.text == text and answer.finished.matched == whole.finished.matched,
            f"with stop strings that never come the text is {answer.text!r} where it was {text!r}. What was held back "
            "for a stop string must be sent when it does not come, also at the end.",
        )
        require(
            answer.usage.completion_tokens == whole.usage.completion_tokens,
            f"with stop strings that never come usage is {answer.usage}, without it was {whole.usage}. Count tokens, "
            "not pieces.",
        )
        require(
            answer.tokens == whole.tokens,
            f"with stop strings that never come the tokens are {answer.tokens}, without they were {whole.tokens}. A "
            "piece of text that was held back has the ids of all its tokens.",
        )

    @engine_check
    async def test_of_several_stop_strings_the_first_that_is_complete_wins(self, client: Client) -> None:
        """Three strings of the answer; the earliest ends it."""
        request, whole = await long_answer(client)
        text = whole.text
        stops = [text[place : place + 3] for place in (len(text) * 3 // 4, len(text) // 3, len(text) // 2)]
        stops = stops[: client.can.max_stop_strings]
        ends = [text.find(stop) + len(stop) for stop in stops]
        first = stops[ends.index(min(ends))]
        answer = await client.answer(client.ask(request, max_tokens=64, stop=stops))
        require(
            answer.text == text[: text.index(first)] and answer.finished.matched in stops,
            f"with stop={stops} the text is {answer.text!r}, matched={answer.finished.matched!r}; {first!r} is "
            "complete first",
        )

    @engine_check
    async def test_stop_strings_are_found_where_text_repeats_itself(self, client: Client) -> None:
        """Output of two tokens in turns, and stop strings that begin again inside their own beginning."""
        _, whole = await long_answer(client)
        two = dict.fromkeys(list(dict.fromkeys(whole.tokens))[:2], 100.0)
        params: dict[str, Any] = {"logit_bias": two, "temperature": 2.0, "seed": 5, "max_tokens": 48}
        try:
            text = (await client.repeatable(client.ask(**params))).text
        except UnsupportedError:
            raise Inapplicable("logit_bias is not supported") from None
        pieces = (text[place : place + size] for size in range(6, 2, -1) for place in range(len(text) - size))
        stops = [stop for stop in dict.fromkeys(pieces) if _naive(text, stop) != text.find(stop)]
        if not stops:
            raise Inapplicable("the text does not repeat itself in this way")
        for stop in stops[:6]:
            answer = await client.answer(client.ask(stop=[stop], **params))
            require(
                answer.text == text[: text.find(stop)],
                f"with stop={stop!r} the text is {answer.text!r}, without it is {text!r}. Where a match breaks off, "
                "another one may have begun inside it.",
            )

    @engine_check
    async def test_as_many_stop_strings_as_declared_work(self, client: Client) -> None:
        """``max_stop_strings`` strings are taken."""
        stops = [f"\u2603{number}" for number in range(client.can.max_stop_strings)]
        _ = (await client.answer(client.ask(max_tokens=4, stop=stops))).finished

    @engine_check
    async def test_a_stop_token_ends_the_output_without_text(self, client: Client) -> None:
        """``stop_token_ids``: the token is counted and gives no text."""
        request, whole = await long_answer(client)
        tokens = whole.tokens
        if len(tokens) < 8:
            raise Inapplicable("the engine reports no token ids")
        token = tokens[len(tokens) // 2]
        place = tokens.index(token)
        answer = await client.answer(client.ask(request, max_tokens=64, stop_token_ids=[token]))
        last = answer.finished
        require(
            answer.tokens == tokens[: place + 1] and (last.reason, last.matched) == (FinishReason.STOP, token),
            f"with stop_token_ids=[{token}] the tokens are {answer.tokens}, reason={last.reason.value}, "
            f"matched={last.matched!r}. Output ends with the first such token, which is counted, and matched is its "
            "id.",
        )
        require(
            answer.usage.completion_tokens == len(answer.tokens),
            f"with a stop token usage counts {answer.usage.completion_tokens} tokens of {len(answer.tokens)}. The "
            "token that ends the output counts.",
        )
        require(
            # A character that the stop token leaves unfinished may be shown as one that is replaced.
            whole.text.startswith(answer.text.rstrip("\ufffd")),
            f"with a stop token the text is {answer.text!r}, which {whole.text!r} does not begin with",
        )
        require(
            answer.usage.completion_tokens == place + 1,
            f"output of {place + 1} tokens, the last one a stop token, has usage {answer.usage}. Count the token that "
            "ends it.",
        )

    @engine_check
    async def test_characters_are_never_cut(self, client: Client) -> None:
        """However tokens cut a character, each piece of text is valid, and all pieces are the whole text."""
        for prompt in ("naïve façade 🙂 世界", "Once upon a time", "こんにちは"):
            answer = await client.answer(client.ask(prompt, max_tokens=64))
            for piece in answer.pieces:
                try:
                    piece.encode()
                except UnicodeEncodeError:
                    require(
                        False,
                        f"the piece {piece!r} has half a character. Hold bytes back until the character is whole.",
                    )
            if not (client.can.tokenize and answer.tokens):
                continue
            due = await client.service.detokenize(answer.tokens)
            if "\ufffd" in due:
                continue
            require(
                "\ufffd" not in answer.text,
                f"the text {answer.text!r} has replacement characters, the same tokens together are {due!r}. Decode "
                "tokens together, not one by one.",
            )

    @engine_check
    async def test_the_text_is_that_of_the_tokens(self, client: Client) -> None:
        """All pieces together are what ``detokenize`` makes of all tokens."""
        service = client.service
        for prompt in ("Once upon a time", "naïve 🙂"):
            answer = await client.answer(client.ask(prompt, max_tokens=48))
            tokens = answer.tokens
            if not tokens:
                raise Inapplicable("the engine reports no token ids")
            due = await service.detokenize(tokens)
            require(
                answer.text.lstrip() == due.lstrip(),
                f"the pieces are {answer.text!r}, but their tokens are {due!r}. Send every character, the last ones, "
                "too, and none twice.",
            )

    @engine_check
    async def test_parts_of_characters_are_joined_and_counted(self, client: Client) -> None:
        """Tokens that are parts of characters, in any order: text, ids and usage are those of all tokens together."""
        service = client.service
        parts = await service.tokenize(client.ask("🙂世é").input)
        bias = dict.fromkeys(parts, 100.0)
        for length in (48, 1, 2, 3):  # the short ones end inside a character
            request = client.ask(max_tokens=length, temperature=2.0, seed=5, logit_bias=bias)
            try:
                answer = await client.answer(request)
            except UnsupportedError:
                raise Inapplicable("logit_bias is not supported, so that these tokens can't be had") from None
            tokens, count = answer.tokens, answer.usage.completion_tokens
            if not tokens:
                raise Inapplicable("the engine reports no token ids")
            require(
                len(tokens) == count,
                f"the pieces hold {len(tokens)} tokens, but usage counts {count}. A token that makes no text by itself "
                "counts, and its id comes with the next piece.",
            )
            due = await service.detokenize(tokens)
            require(
                answer.text.lstrip() == due.lstrip(),
                f"the pieces are {answer.text!r}, but their tokens are {due!r}. Hold the bytes of a character back "
                "until it is whole, and decode them together.",
            )

    @engine_check
    async def test_the_tokenizer_is_the_one_that_generate_uses(self, client: Client) -> None:
        """``tokenize``, ``count`` and the prompt tokens of a request agree; ids are taken as they are."""
        service = client.service
        for text in ("Once upon a time", "naïve façade 🙂 世界", "  two  spaces\n"):
            request = client.ask(text, max_tokens=1)
            tokens = await service.tokenize(request.input)
            prompted = (await client.answer(request)).usage.prompt_tokens
            require(
                len(tokens) == prompted == await service.count(request.input),
                f"{text!r} is {len(tokens)} tokens for tokenize(), and {prompted} for generate()",
            )
            if client.can.chat:
                chat = ChatInput([Message("user", text)])
                params = SamplingParams(max_tokens=1)
                prompted = (await client.answer(GenerateRequest(input=chat, params=params))).usage.prompt_tokens
                require(
                    len(await service.tokenize(chat)) == prompted,
                    f"a chat that says {text!r} is {len(await service.tokenize(chat))} tokens for tokenize(), and "
                    f"{prompted} for generate(). Both count what the chat template makes of it.",
                )
            if isinstance(request.input, TextInput):
                again = await client.answer(client.ask(tokens, max_tokens=8))
                same = await client.answer(client.ask(text, max_tokens=8))
                require(
                    again.usage == same.usage or client.can.prefix_reuse,
                    "the tokens of a text give another usage than the text",
                )
                require(
                    not client.can.deterministic or again.tokens == same.tokens,
                    f"{text!r} gives {same.tokens}, its own token ids give {again.tokens}",
                )
                require(await service.tokenize(TokenInput(tokens)) == tokens, "tokenize() changed token ids")

    @engine_check
    async def test_detokenize_refuses_what_is_no_token(self, client: Client) -> None:
        """Ids outside the vocabulary are an ``InvalidRequestError``; no ids at all are an empty text."""
        service = client.service
        require(await service.detokenize([]) == "", "detokenize([]) is not an empty text")
        if client.can.vocab_size is None:
            raise Inapplicable("capabilities.vocab_size is None: nobody knows which ids are outside")
        for ids in ([client.can.vocab_size], [0, -1]):
            with refused(InvalidRequestError, f"detokenize({ids}), with a vocab_size of {client.can.vocab_size},"):
                await service.detokenize(ids)

    @engine_check
    async def test_the_end_token_gives_no_text(self, client: Client) -> None:
        """An end token has no text, and its id is ``matched``; ``ignore_eos`` and ``min_tokens`` prevent it."""
        end = await end_token(client)
        forced: dict[str, Any] = {"logit_bias": {end: 100.0}, "max_tokens": 6}
        answer = await client.answer(client.ask(endless=False, **forced))
        last = answer.finished
        if last.matched != end:
            raise Inapplicable("a bias of 100 does not make this model end")
        require(
            answer.text == "" and last.reason is FinishReason.STOP and answer.tokens in ([], [end]),
            f"an output of the end token alone is {answer.text!r}, reason={last.reason.value}. It gives no text, "
            "and the reason is stop.",
        )
        require(
            answer.usage.completion_tokens == 1,
            f"the end token counts: usage says {answer.usage.completion_tokens}, not 1",
        )
        kept = await client.answer(client.ask(endless=True, **forced))
        require(end not in kept.tokens, "with ignore_eos the end token was picked all the same")
        late = await client.answer(client.ask(endless=False, min_tokens=4, **forced))
        require(
            late.usage.completion_tokens >= 4,
            f"min_tokens=4 gave {late.usage.completion_tokens} tokens. No end token may be picked before that.",
        )


async def long_answer(client: Client) -> tuple[str, Answer]:
    """A prompt, and an answer to it that comes out the same each time and has some text; asked once of an engine."""
    prompt = "Tell me a story"
    answer = _long_answers.get(client.engine)
    if answer is None:
        answer = _long_answers[client.engine] = await client.repeatable(client.ask(prompt, max_tokens=64))
    if len(answer.text) < 12:
        raise Inapplicable(f"the model says too little: {answer.text!r}")
    return prompt, answer


def _stop_strings(answer: Answer) -> list[str]:
    """Of its text: its first character, one in a piece, some over two and three pieces, and its end."""
    text, pieces = answer.text, answer.pieces
    ends = [sum(map(len, pieces[: count + 1])) for count in range(len(pieces))]
    middle = len(ends) // 2
    stops = [text[0], text[-4:], text[len(text) // 2 :][:5]]
    for border in (ends[0], ends[middle], ends[max(0, middle - 3)]):
        stops += [text[max(0, border - 1) : border + 1], text[max(0, border - 3) : border + 4]]
    return [stop for stop in dict.fromkeys(stops) if stop]


def _naive(text: str, stop: str) -> int:
    """Where a search finds a string that forgets all when a match breaks off; -1 for nowhere."""
    matched = 0
    for place, char in enumerate(text):
        matched = matched + 1 if char == stop[matched] else int(char == stop[0])
        if matched == len(stop):
            return place + 1 - matched
    return -1


async def end_token(client: Client) -> int:
    """The id with which the model ends by itself.

    Raises:
        Inapplicable: it never does.
    """
    for prompt in ("Hi", "Once upon a time", "Hello"):
        answer = await client.answer(client.ask(prompt, endless=False, max_tokens=_TO_THE_END, temperature=1.0, seed=1))
        last = answer.events[-1]
        if isinstance(last, Finished) and isinstance(last.matched, int):
            return last.matched
    raise Inapplicable("the model did not end by itself, so that its end token is not known")
