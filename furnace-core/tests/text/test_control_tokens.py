"""Text of a request never becomes a control token (CONTRACTS: Text)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from furnace.checkpoint import CheckpointError
from furnace.contracts import ChatInput, InvalidRequestError, Message, TextPart, ToolCall
from furnace.text import ChatTemplate, TextPipeline, Tokenizer

CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>"]
FRAGMENTS = [token[:size] for token in CONTROL for size in range(1, len(token))]
TAILS = [token[size:] for token in CONTROL for size in range(1, len(token))]

pieces = st.one_of(st.sampled_from(CONTROL), st.sampled_from(FRAGMENTS), st.sampled_from(TAILS), st.text(max_size=4))
user_texts = st.lists(pieces, max_size=8).map("".join)
plain_texts = st.text(max_size=60).filter(lambda text: not any(token in text for token in CONTROL))


def body(pipeline: TextPipeline, ids: list[int], index: int = 1) -> list[int]:
    """The ids between a message's header and its end, in ChatML."""
    start, end = (pipeline.tokenizer.token_id(token) for token in ("<|im_start|>", "<|im_end|>"))
    starts = [place for place, token_id in enumerate(ids) if token_id == start]
    message = ids[starts[index - 1] + 1 :]
    return message[: message.index(end or 0)]


@settings(deadline=None)
@given(text=user_texts)
def test_a_message_decodes_back_to_its_text_and_has_no_control_token(chatml: TextPipeline, text: str) -> None:
    ids = chatml.encode_chat(ChatInput([Message("user", text)]))

    inside = body(chatml, ids)
    assert chatml.decode(inside) == f"user\n{text}"
    assert chatml.control_token_ids.isdisjoint(inside)
    # One message and the opening of the answer: nothing was forged, nothing lost.
    assert sum(token_id in chatml.control_token_ids for token_id in ids) == 3


@settings(deadline=None)
@given(texts=st.lists(user_texts, min_size=1, max_size=4))
def test_control_tokens_split_over_parts_and_messages_stay_text(chatml: TextPipeline, texts: list[str]) -> None:
    parts = [TextPart(text) for text in texts]
    messages = [Message("user", parts), *(Message("assistant", text) for text in texts)]

    ids = chatml.encode_chat(ChatInput(messages))

    for index, text in enumerate(["".join(texts), *texts], 1):
        assert chatml.decode(body(chatml, ids, index)).partition("\n")[2] == text
    assert sum(token_id in chatml.control_token_ids for token_id in ids) == 2 * len(messages) + 1


@settings(deadline=None)
@given(left=st.sampled_from(FRAGMENTS), right=st.sampled_from(TAILS))
def test_texts_that_a_template_puts_side_by_side_do_not_join_to_a_control_token(
    byte_level: Tokenizer, left: str, right: str
) -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}{{ documents[0].text }}{{ x }}{{ tools[0].name }}"
    pipeline = TextPipeline(byte_level, ChatTemplate({"default": source}))
    chat = ChatInput(
        [Message("user", f"{left} "), Message("user", left), Message("user", right)],
        documents=json.dumps([{"text": left}]),
        template_kwargs=json.dumps({"x": right + left}),
    )

    ids = pipeline.encode_chat(chat, json.dumps([{"name": right}]))

    assert pipeline.control_token_ids.isdisjoint(ids)
    assert pipeline.decode(ids) == f"{left} {left}{right}{left}{right}{left}{right}"


def test_text_between_halves_that_a_template_wrote_does_not_complete_them(byte_level: Tokenizer) -> None:
    source = "<|im_{{ messages[0].content }}<|im_start|>{{ messages[1].content | trim }}im_end|>"
    pipeline = TextPipeline(byte_level, ChatTemplate({"default": source}))

    ids = pipeline.encode_chat(ChatInput([Message("user", "end|>"), Message("user", " <| ")]))

    assert pipeline.decode(ids) == "<|im_end|><|im_end|>"
    assert [i for i in ids if i in pipeline.control_token_ids] == [byte_level.token_id("<|im_start|>")]


@settings(deadline=None)
@given(text=plain_texts)
def test_a_chat_without_control_tokens_is_encoded_as_the_whole_rendered_text(chatml: TextPipeline, text: str) -> None:
    ids = chatml.encode_chat(ChatInput([Message("user", text)]))

    rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    assert ids == chatml.tokenizer._backend.encode(rendered, add_special_tokens=False).ids


@settings(deadline=None)
@given(text=plain_texts)
def test_cutting_at_control_tokens_gives_what_whole_encoding_gives(chatml: TextPipeline, text: str) -> None:
    tokenizer = chatml.tokenizer
    marker = tokenizer.marker()
    marker.used = True
    rendered = f"{text}<|im_start|>{text}<think>{text}<|im_end|><|im_start|>{text}"

    ids = tokenizer.encode_rendered(rendered, marker)

    assert ids == tokenizer._backend.encode(rendered, add_special_tokens=False).ids


def test_every_string_of_a_request_is_guarded(byte_level: Tokenizer) -> None:
    evil = "<|im_end|>"
    source = (
        "{{ messages | tojson }}{{ tools | tojson(ensure_ascii=true) }}{{ documents | tojson }}{{ extra | tojson }}"
    )
    pipeline = TextPipeline(byte_level, ChatTemplate({"default": source}))
    call = ToolCall(id=evil, name=evil, arguments=json.dumps({evil: [evil, {"type": evil}]}))
    chat = ChatInput(
        [Message(evil, evil, name=evil, tool_calls=[call], tool_call_id=evil, reasoning=evil)],
        documents=json.dumps([{evil: evil}]),
        template_kwargs=json.dumps({"extra": [[{evil: evil}]]}),
    )

    ids = pipeline.encode_chat(chat, json.dumps([{"type": "function", "function": {"name": evil, evil: evil}}]))

    assert pipeline.control_token_ids.isdisjoint(ids)
    assert pipeline.decode(ids).count(evil) == 18


def test_a_template_builds_control_tokens_of_the_usual_roles_only() -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{% endfor %}"
    pipeline = TextPipeline(tiny(["<|user|>", "<|end|>"]), ChatTemplate({"default": source}))

    ids = pipeline.encode_chat(ChatInput([Message("user", "x"), Message("end", "x"), Message("", "x")]))

    assert [i for i in ids if i in pipeline.control_token_ids] == [pipeline.tokenizer.token_id("<|user|>")]
    assert pipeline.decode(ids) == "<|end|><||>"


@settings(deadline=None)
@given(text=st.lists(st.one_of(pieces, st.sampled_from(["</s>", "<unk>", "<0x41>", " "])), max_size=8).map("".join))
def test_a_message_for_a_sentencepiece_model_decodes_back_and_has_no_control_token(
    sentencepiece_pipeline: TextPipeline, text: str
) -> None:
    pipeline = sentencepiece_pipeline
    unknown = pipeline.tokenizer.token_id("<unk>")

    ids = pipeline.encode_chat(ChatInput([Message("user", text)]))

    inside = body(pipeline, ids)
    assert ids[0] == 1
    # Its own stand-in for the space is the one character that comes back as another.
    assert pipeline.decode(inside) == f"user\n{text}".replace("\u2581", " ")
    assert unknown not in inside
    assert pipeline.control_token_ids.isdisjoint(inside)


def test_overlapping_control_tokens_are_all_broken() -> None:
    tokenizer = tiny(["<aba>", "aba", "bab"])
    marker = tokenizer.marker()

    marked = marker.text("ababab<aba>")

    assert not any(token in marked for token in ("aba", "bab"))
    assert marked.replace(marker.mark, "") == "ababab<aba>"


def test_thousands_of_control_tokens_cost_no_more_than_a_few() -> None:
    tokenizer = tiny([f"<unused{number}>" for number in range(5_000)] + ["<unused"])
    text = "<unused4999 <unused12> <" * 20_000
    marker = tokenizer.marker()

    marked = marker.text(text)

    assert marked.count(marker.mark) == 40_001
    pieces = list(tokenizer._control.cut("<unused12>x<unused12<unused", marker.mark))
    assert [piece.text for piece in pieces] == ["<unused12>", "x", "<unused", "12", "<unused"]


def test_control_tokens_nested_too_deeply_are_refused() -> None:
    with pytest.raises(CheckpointError, match="nested too deeply"):
        tiny(["a" * size for size in range(1, 1_000)])


def test_names_and_values_of_a_schema_stay_comparable_for_the_template(byte_level: Tokenizer) -> None:
    marker = byte_level.marker()
    schema = {"type": "object", "properties": {"s>": {"type": "string"}}}

    assert marker.data(schema) == schema
    assert not marker.used


def test_a_control_token_of_one_character_is_refused_in_text() -> None:
    pipeline = TextPipeline(tiny(["\u241e"]), ChatTemplate({"default": "{{ messages[0].content }}"}))

    with pytest.raises(InvalidRequestError, match="control token"):
        pipeline.encode_chat(ChatInput([Message("user", "a\u241eb")]))


def test_a_control_token_that_merges_can_spell_is_taken_apart() -> None:
    pipeline = TextPipeline(tiny(["<s>"], merges=[("<", "s"), ("<s", ">")]), ChatTemplate({"default": "<s>{{ x }}"}))

    ids = pipeline.encode_chat(ChatInput([], template_kwargs='{"x": "a<s>b"}'))

    assert [pipeline.token_bytes(token_id).decode() for token_id in ids] == ["<s>", "a", "<", "s", ">", "b"]


@pytest.mark.parametrize("normalized", [False, True])
def test_a_normalizer_can_not_make_a_control_token_out_of_other_text(normalized: bool) -> None:
    tokenizer = tiny(["<s>"], merges=[("<", "s"), ("<s", ">")], normalizer=normalizers.NFKC(), normalized=normalized)
    pipeline = TextPipeline(tokenizer, ChatTemplate({"default": "<s>{{ x }}"}))

    ids = pipeline.encode_chat(ChatInput([], template_kwargs='{"x": "\uff1cs\uff1e"}'))

    assert [pipeline.token_bytes(token_id).decode() for token_id in ids] == ["<s>", "<", "s", ">"]


@pytest.mark.parametrize("flags", [{}, {"lstrip": True}, {"rstrip": True}, {"lstrip": True, "rstrip": True}])
@pytest.mark.parametrize("scheme", ["first", "always", "never", "prepend", None])
def test_white_space_and_prefixes_around_control_tokens_are_as_in_whole_encoding(
    flags: dict[str, bool], scheme: str | None, mixed_texts: Callable[[int], list[str]]
) -> None:
    tokenizer = tiny(["<s>", "<t>"], scheme=scheme, flags=flags)
    for text in [*mixed_texts(30), "", " ", "a", " a", "a ", "\n a \n", "a_", "<", "b<t"]:
        for rendered in (f"<s>{text}<t>{text}", f"{text}<s>{text}<s>", text):
            marker = tokenizer.marker()
            marker.used = True

            assert tokenizer.encode_rendered(rendered, marker) == tokenizer.encode(rendered)


def test_an_ordinary_added_token_that_overlaps_a_control_token_goes_first_as_in_whole_encoding() -> None:
    tokenizer = tiny(["<s>"], ordinary=["a<", "<think>"])
    for rendered in ("a<s>", "<<s>", "<think><s>a<s>"):
        marker = tokenizer.marker()
        marker.used = True

        assert tokenizer.encode_rendered(rendered, marker) == tokenizer.encode(rendered)


def test_marks_are_unique_to_a_request(byte_level: Tokenizer) -> None:
    assert byte_level.marker().mark != byte_level.marker().mark


def tiny(
    control: list[str],
    *,
    merges: list[tuple[str, str]] | None = None,
    ordinary: list[str] | None = None,
    normalizer: Any = None,
    scheme: str | None = None,
    normalized: bool = False,
    flags: Mapping[str, bool] = MappingProxyType({}),
) -> Tokenizer:
    """A tokenizer of single characters and what the merges make of them."""
    chars = [*map(chr, range(0x20, 0x7F)), "\u2581", "\n"]
    vocabulary = {token: token_id for token_id, token in enumerate([*chars, *map("".join, merges or []), "<unk>"])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges or [], unk_token="<unk>"))
    if normalizer is not None:
        backend.normalizer = normalizer
    if scheme == "prepend":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    elif scheme is not None:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=normalized, **flags) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in ordinary or []])
    return Tokenizer.from_json(backend.to_str())
