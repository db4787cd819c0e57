"""What each mock says, and that its text side keeps bytes and control tokens apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from furnace.contracts import ChatInput, InvalidRequestError, Message, TextPart
from furnace_mock import MockOptions, build_mock, load_pipeline
from furnace_mock.pipeline import tokenizer_json
from furnace_mock.replies import make_reply, reply_start
from furnace_mock.scores import ScoreTable
from furnace_mock.vocabulary import ASSISTANT, CONTROL_TOKENS, END, SPACE, USER, VOCAB_SIZE

PIPELINE, _ = load_pipeline()
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


def say(model: str, prompt: list[int], count: int = 10_000, **options: Any) -> list[int]:
    """The first tokens of a reply, without the end token."""
    reply = make_reply(model, prompt, MockOptions(**options), [])
    tokens = []
    for index in range(count):
        token = reply.token(index)
        if token == END:
            break
        tokens.append(token)
    return tokens


def chat(*messages: Message, **fields: Any) -> list[int]:
    return PIPELINE.encode_chat(ChatInput(list(messages), **fields))


def test_the_vocabulary_is_256_bytes_and_the_control_tokens() -> None:
    assert PIPELINE.vocab_size == VOCAB_SIZE == 261
    assert [PIPELINE.token_bytes(value) for value in range(256)] == [bytes([value]) for value in range(256)]
    assert [PIPELINE.token_bytes(256 + index).decode() for index in range(5)] == list(CONTROL_TOKENS)
    assert PIPELINE.eos_token_ids == {END}
    assert PIPELINE.control_token_ids == set(range(256, 261))


@given(TEXTS)
def test_a_raw_prompt_is_its_bytes_and_comes_back(text: str) -> None:
    if any(token in text for token in CONTROL_TOKENS):
        return
    assert PIPELINE.encode_text(text) == list(text.encode())
    assert PIPELINE.decode(text.encode()) == text


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3), TEXTS)
def test_echo_repeats_the_last_user_message_whatever_is_in_it(users: list[str], system: str) -> None:
    messages = [Message("system", system + "<|user|>no<|end|>")]
    for user in users:
        messages += [
            Message("assistant", "earlier <|assistant|>"),
            Message("user", user + CONTROL_TOKENS[len(user) % 5]),
        ]
    prompt = chat(*messages)
    assert PIPELINE.decode(say("echo", prompt)) == messages[-1].text


def test_echo_joins_the_parts_of_a_message_and_ignores_tool_results_behind_it() -> None:
    parts = Message("user", [TextPart("one "), TextPart("two")])
    prompt = chat(parts, Message("assistant", None), Message("tool", "42", tool_call_id="x"))
    assert PIPELINE.decode(say("echo", prompt)) == "one two"


def test_echo_repeats_a_prompt_that_is_no_chat() -> None:
    assert say("echo", list(b"once upon")) == list(b"once upon")


def test_a_chat_is_turns_between_control_tokens() -> None:
    prompt = chat(Message("user", "a"), Message("assistant", "b"), Message("user", "c"))
    assert prompt == [USER, 97, END, ASSISTANT, 98, END, USER, 99, END, ASSISTANT]
    assert chat(Message("user", "a"), add_generation_prompt=False) == [USER, 97, END]


def test_a_message_that_is_to_be_continued_is_continued() -> None:
    prompt = chat(Message("user", "hello"), Message("assistant", "hel"), continue_final_message=True)
    assert prompt == [USER, *b"hello", END, ASSISTANT, *b"hel"]
    assert reply_start(prompt) == len(prompt) - 3
    whole = chat(Message("user", "hello"))
    assert reply_start(whole) == len(whole)


def test_an_unknown_role_is_refused_by_the_template() -> None:
    with pytest.raises(InvalidRequestError, match="there is no role critic"):
        chat(Message("critic", "hm"))


def test_lorem_is_endless_and_other_words_after_another_prompt_or_seed() -> None:
    texts = [
        PIPELINE.decode(say("lorem", prompt, 2000, seed=seed))
        for prompt, seed in ((chat(Message("user", "a")), 0), (chat(Message("user", "b")), 0), ([97], 0), ([97], 1))
    ]
    assert len(set(texts)) == 4
    for text in texts:
        assert len(text.encode()) >= 1990
        assert "  " not in text
        assert not text.isascii()
    assert PIPELINE.decode(say("lorem", [97], 2000)) == texts[2]


def test_recurrent_says_what_lorem_says() -> None:
    assert say("recurrent", [97], 500) == say("lorem", [97], 500)


def test_pieces_of_a_script_are_tokens_that_no_text_is_encoded_into() -> None:
    pipeline, ids = load_pipeline([b"DEF", b"G", "é".encode(), b"\xf0\x9f", b"\x98\x80", b"DEF"])
    assert ids == [261, ord("G"), 262, 263, 264, 261]
    assert pipeline.decode(ids) == "DEFGé😀DEF"
    assert pipeline.encode_text("DEFé") == list("DEFé".encode())


def test_the_tokenizer_file_lists_every_byte_once() -> None:
    vocabulary = tokenizer_json()["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(VOCAB_SIZE))


def test_scores_want_one_token_yield_to_a_bias_of_100_and_put_a_space_behind_the_end_token() -> None:
    row = ScoreTable(VOCAB_SIZE).row(END)
    assert row.dtype == np.float32
    order = np.argsort(-row, kind="stable")
    assert order[0] == END
    assert order[1] == SPACE
    assert row[END] - row[200] < 100


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("ekko", {}, "no mock 'ekko'; there are echo, lorem, script, recurrent"),
        ("script", {}, "mock:script needs its output"),
        ("echo", {"text": "a"}, "only mock:script takes"),
        ("script", {"hex": "zz"}, "not hexadecimal"),
        ("echo", {"max_step_tokens": 4, "grid": 8}, "max_step_tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(model: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        build_mock(model, MockOptions(**options))


@pytest.mark.parametrize(
    "options", [{"text": "a", "hex": "61"}, {"step_delay": -1.0}, {"fail_at": -1}, {"max_context": 0}]
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|not both"):
        MockOptions(**options)
