from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

import furnace.text
from furnace.checkpoint import CheckpointError
from furnace.contracts import ChatInput, InvalidRequestError, Message, TextPart, ToolCall
from furnace.contracts.capabilities import OutputFormat
from furnace.text import ChatTemplate, TextPipeline, Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WITH_BOS = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"
HELLO = ChatInput([Message("user", "hello")])


def rendered(pipeline: TextPipeline, chat: ChatInput, tools: str | None = None) -> str:
    """The prompt as text, control tokens included."""
    return pipeline.tokenizer._backend.decode(pipeline.encode_chat(chat, tools), skip_special_tokens=False)


def shows(byte_level: Tokenizer, source: str) -> TextPipeline:
    return TextPipeline(byte_level, ChatTemplate({"default": source}))


# BOS (T34)


@pytest.mark.parametrize("template", [WITH_BOS, CHATML])
def test_a_chat_has_one_bos_at_most_however_many_places_add_one(
    model_files: Callable[..., TextPipeline], byte_level_metadata: dict[str, object], template: str
) -> None:
    from_files = model_files(chat_template=template)
    from_gguf = TextPipeline.from_gguf(
        byte_level_metadata | {"tokenizer.ggml.add_bos_token": True}, chat_template=template
    )
    bos = from_files.tokenizer.token_id("<s>")

    # A tokenizer.json leaves the chat's BOS to the template, as transformers does; a GGUF file's flag adds it.
    assert from_files.encode_chat(HELLO).count(bos or 0) == (1 if template is WITH_BOS else 0)
    assert from_gguf.encode_chat(HELLO).count(bos or 0) == 1
    assert from_gguf.encode_chat(HELLO)[0] == bos


def test_a_raw_prompt_has_bos_once_and_its_control_tokens_are_parsed(model_files: Callable[..., TextPipeline]) -> None:
    pipeline = model_files()
    bos, end = pipeline.tokenizer.token_id("<s>"), pipeline.tokenizer.token_id("<|im_end|>")

    ids = pipeline.encode_text("hello<|im_end|>")

    assert ids[0] == bos
    assert ids[-1] == end
    assert ids.count(bos or 0) == 1
    assert pipeline.encode_text("<s>hello<|im_end|>") == ids
    assert pipeline.encode_text("") == [bos]


def test_chats_and_prompts_equal_those_of_transformers(
    model_files: Callable[..., TextPipeline], byte_level_json: str, mixed_texts: Callable[[int], list[str]]
) -> None:
    transformers = pytest.importorskip("transformers")
    backend = furnace.text.Tokenizer.from_json(byte_level_json)._backend
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", chat_template=CHATML
    )
    pipeline = model_files({"chat_template": CHATML})
    for text in mixed_texts(200):
        messages = [{"role": "user", "content": text}]

        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert pipeline.encode_chat(ChatInput([Message("user", text)])) == expected
        assert pipeline.encode_text(text) == reference(text)["input_ids"]


# Messages


def test_a_developer_message_is_a_system_message(chatml: TextPipeline) -> None:
    as_developer = chatml.encode_chat(ChatInput([Message("developer", "x")]))

    assert as_developer == chatml.encode_chat(ChatInput([Message("system", "x")]))


def test_arguments_of_tool_calls_are_data_for_the_template(byte_level: Tokenizer) -> None:
    pipeline = shows(
        byte_level, "{% for c in messages[0].tool_calls %}{{ c.id }} {{ c.function | tojson }};{% endfor %}"
    )
    calls = [
        ToolCall(id="call_1", name="f", arguments='{"x": [1, "é"]}'),
        ToolCall(id="call_2", name="g", arguments=""),
    ]

    text = rendered(pipeline, ChatInput([Message("assistant", tool_calls=calls)]))

    assert text == 'call_1 {"name": "f", "arguments": {"x": [1, "é"]}};call_2 {"name": "g", "arguments": {}};'


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"x": NaN}', "{" + '"a":{' * 50_000])
def test_damaged_arguments_are_refused_by_their_path(chatml: TextPipeline, arguments: str) -> None:
    call = ToolCall(id="call_1", name="f", arguments=arguments)
    chat = ChatInput([Message("user", "x"), Message("assistant", tool_calls=[call])])

    with pytest.raises(InvalidRequestError) as caught:
        chatml.encode_chat(chat)

    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    assert len(caught.value.message) < 250


def test_content_null_with_tool_calls_renders_in_templates_that_know_it_and_in_those_that_do_not(
    byte_level: Tokenizer,
) -> None:  # T64
    call = ToolCall(id="call_1", name="f", arguments="{}")
    chat = ChatInput([Message("user", "q"), Message("assistant", None, tool_calls=[call]), Message("tool", "42")])
    knows = "{% for m in messages %}[{{ m.content if m.content is defined else 'absent' }}]{% endfor %}"
    adds = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"

    assert rendered(shows(byte_level, knows), chat) == "[q][absent][42]"
    assert rendered(shows(byte_level, adds), chat) == "[q][][42]"


def test_empty_content_in_the_history_is_fine(chatml: TextPipeline) -> None:  # T65
    chat = ChatInput([Message("user", "q"), Message("assistant", ""), Message("user", "again")])

    assert "<|im_start|>assistant\n<|im_end|>" in rendered(chatml, chat)


def test_parts_are_one_string_for_templates_that_take_strings_and_parts_for_those_that_take_parts(
    byte_level: Tokenizer,
) -> None:
    chat = ChatInput([Message("user", [TextPart("a"), TextPart("b")]), Message("user", "c")])
    takes_parts = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
    takes_both = "{% for m in messages %}{{ m.content if m.content is string else m.content[0].text }}{% endfor %}"

    assert rendered(shows(byte_level, takes_parts), chat) == "(a)(b)(c)"
    assert rendered(shows(byte_level, takes_both), chat) == "abc"


def test_names_reasoning_and_tool_call_ids_reach_the_template(byte_level: Tokenizer) -> None:
    source = "{{ messages[0].name }} {{ messages[0].reasoning_content }} {{ messages[0].tool_call_id }}"
    message = Message("assistant", "x", name="Ann", reasoning="because", tool_call_id="call_9")

    assert rendered(shows(byte_level, source), ChatInput([message])) == "Ann because call_9"


def test_tools_documents_and_further_variables_reach_the_template(byte_level: Tokenizer) -> None:
    source = (
        "{{ tools | tojson }}{{ documents | tojson }}{{ enable_thinking }}{{ bos_token }}{{ add_generation_prompt }}"
    )
    chat = ChatInput(
        HELLO.messages,
        template_kwargs='{"enable_thinking": false}',
        documents='[{"text": "d"}]',
        add_generation_prompt=False,
    )

    assert rendered(shows(byte_level, source), chat, '[{"a": 1}]') == '[{"a": 1}][{"text": "d"}]False<s>False'
    assert rendered(shows(byte_level, "{{ tools is none }}"), chat, "[]") == "True"


@pytest.mark.parametrize(
    ("changes", "tools", "param"),
    [
        ({"template_kwargs": "[]"}, None, "chat_template_kwargs"),
        ({"template_kwargs": '{"messages": []}'}, None, "chat_template_kwargs.messages"),
        ({"template_kwargs": '{"chat_template": "x"}'}, None, "chat_template_kwargs.chat_template"),
        ({"documents": "{}"}, None, "documents"),
        ({}, "{}", "tools"),
        ({}, "[" * 100_000, "tools"),
        ({}, "[" * 900 + "]" * 900, "tools"),
        ({}, '[{"x": "\\ud83d"}]', "messages"),
    ],
)
def test_what_can_not_be_rendered_is_refused_by_name(
    byte_level: Tokenizer, changes: dict[str, str], tools: str | None, param: str
) -> None:
    pipeline = shows(byte_level, "{{ messages[0].content }}{{ tools | tojson }}")

    with pytest.raises(InvalidRequestError) as caught:
        pipeline.encode_chat(ChatInput(HELLO.messages, **changes), tools)  # type: ignore[arg-type]

    assert caught.value.param == param
    assert len(caught.value.message) < 250


@pytest.mark.parametrize("text", ["\ud83d", "ok \udc00 ok"])
def test_a_lone_surrogate_is_refused(chatml: TextPipeline, text: str) -> None:  # T39
    with pytest.raises(InvalidRequestError, match="lone surrogate") as chat_error:
        chatml.encode_chat(ChatInput([Message("user", text)]))
    with pytest.raises(InvalidRequestError, match="lone surrogate") as text_error:
        chatml.encode_text(text)

    assert (chat_error.value.param, text_error.value.param) == ("messages", "prompt")


def test_a_model_without_a_template_takes_completions_only(byte_level: Tokenizer) -> None:
    pipeline = TextPipeline(byte_level)

    assert not pipeline.has_chat_template
    assert pipeline.output_format is None
    with pytest.raises(InvalidRequestError, match="no chat template"):
        pipeline.encode_chat(HELLO)


# Continuing the last message


@pytest.mark.parametrize("content", ["The answer", "The answer ", "The <|im_end|> answer is <"])
def test_a_continued_message_is_left_open(chatml: TextPipeline, content: str) -> None:
    chat = ChatInput([Message("user", "q"), Message("assistant", content)], continue_final_message=True)

    assert rendered(chatml, chat) == f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{content}"


def test_a_continued_message_equals_that_of_transformers(byte_level: Tokenizer) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    for source in (CHATML, trims):
        for content in ("The answer", "The answer ", "line\n"):
            messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
            expected, _ = utils.render_jinja_template([messages], chat_template=source, continue_final_message=True)
            chat = ChatInput([Message("user", "q"), Message("assistant", content)], continue_final_message=True)

            assert rendered(shows(byte_level, source), chat) == expected[0]


def test_a_continued_message_of_parts_is_left_open(byte_level: Tokenizer) -> None:
    source = "{% for m in messages %}{% for p in m.content %}({{ p.text }}){% endfor %}{% endfor %}"
    chat = ChatInput([Message("assistant", [TextPart("a"), TextPart("b")])], continue_final_message=True)

    assert rendered(shows(byte_level, source), chat) == "(a)(b"


@pytest.mark.parametrize(
    ("source", "messages", "param"),
    [
        (CHATML, [Message("assistant", None)], "continue_final_message"),
        ("{{ messages[0].role }}", [Message("assistant", "x")], "continue_final_message"),
        (CHATML, [], "messages"),
    ],
)
def test_a_message_that_can_not_be_continued_is_refused(
    byte_level: Tokenizer, source: str, messages: list[Message], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        shows(byte_level, source).encode_chat(ChatInput(messages, continue_final_message=True))

    assert caught.value.param == param


# What is found in the files


def test_end_tokens_come_from_the_generation_config_and_the_tokenizer(model_files: Callable[..., TextPipeline]) -> None:
    pipeline = model_files(generation={"eos_token_id": [3, 4]})
    end = pipeline.tokenizer.token_id("<|im_end|>")

    assert pipeline.eos_token_ids == {3, 4, end}
    assert model_files(generation={"eos_token_id": 5}).eos_token_ids == {5, end}
    assert model_files().eos_token_ids == {end}
    assert model_files({"eos_token": None}).eos_token_ids == frozenset()


def test_one_of_several_named_templates_is_for_tools(model_files: Callable[..., TextPipeline]) -> None:
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]

    for spelled in (templates, {item["name"]: item["template"] for item in templates}):
        pipeline = model_files({"chat_template": spelled})
        assert rendered(pipeline, HELLO) == "plain"
        assert rendered(pipeline, HELLO, '[{"a": 1}]') == "tools"


def test_a_given_template_replaces_the_files_own(
    model_files: Callable[..., TextPipeline], byte_level_metadata: dict[str, object]
) -> None:
    assert rendered(model_files({"chat_template": CHATML}, chat_template="mine"), HELLO) == "mine"
    assert rendered(TextPipeline.from_gguf(byte_level_metadata, chat_template="mine"), HELLO) == "mine"


def test_a_gguf_file_may_have_a_template_for_tools(byte_level_metadata: dict[str, object]) -> None:
    pipeline = TextPipeline.from_gguf(byte_level_metadata | {"tokenizer.chat_template.tool_use": "tools"})

    assert rendered(pipeline, HELLO, '[{"a": 1}]') == "tools"


def test_a_checkpoint_is_read_from_its_text_files_or_its_metadata(
    tmp_path: Path, model_files: Callable[..., TextPipeline], byte_level_metadata: Mapping[str, object]
) -> None:
    model_files({"chat_template": "from the config"})

    def text_file(name: str) -> Path | None:
        return tmp_path / name if (tmp_path / name).exists() else None

    checkpoint: Any = SimpleNamespace(name="m", gguf_metadata=None, text_file=text_file)
    assert rendered(TextPipeline.from_checkpoint(checkpoint), HELLO) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert rendered(TextPipeline.from_checkpoint(checkpoint), HELLO) == "from its own file"
    assert rendered(TextPipeline.from_checkpoint(checkpoint, chat_template="given"), HELLO) == "given"

    gguf: Any = SimpleNamespace(name="m", gguf_metadata=byte_level_metadata, text_file=text_file)
    assert rendered(TextPipeline.from_checkpoint(gguf), HELLO).startswith("<|im_start|>user\nhello")

    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"'m' has no tokenizer\.json"):
        TextPipeline.from_checkpoint(checkpoint)


def test_a_directory_is_read_whatever_its_weights_are(tmp_path: Path, model_files: Callable[..., TextPipeline]) -> None:
    model_files({"chat_template": "from the config"})
    assert rendered(TextPipeline.from_directory(tmp_path), HELLO) == "from the config"
    (tmp_path / "chat_template.jinja").write_text("from its own file")
    assert rendered(TextPipeline.from_directory(tmp_path), HELLO) == "from its own file"
    assert rendered(TextPipeline.from_directory(tmp_path, chat_template="given"), HELLO) == "given"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert 7 in TextPipeline.from_directory(tmp_path).eos_token_ids
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        TextPipeline.from_directory(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a usable tokenizer.json"),
        ("tokenizer.json", "nonsense", "not a usable tokenizer.json"),
        ("tokenizer.json", "\ud800", "can't read tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', "chat_template must be"),
        ("tokenizer_config.json", '{"chat_template": "{% if"}', "syntax error in line 1"),
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
    ],
)
def test_damaged_files_are_refused_by_name(
    tmp_path: Path, model_files: Callable[..., TextPipeline], name: str, content: str, message: str
) -> None:
    model_files()
    (tmp_path / name).write_bytes(content.encode(errors="surrogatepass"))

    with pytest.raises(CheckpointError, match=message):
        TextPipeline.from_files(
            tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json", None, tmp_path / "generation_config.json"
        )


def test_a_missing_file_is_named_without_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"^can't read nowhere\.json: No such file or directory$"):
        TextPipeline.from_files(tmp_path / "nowhere.json")


def test_added_tokens_with_a_gap_before_them_are_refused(byte_level_json: str) -> None:
    description = json.loads(byte_level_json)
    description["added_tokens"][-1]["id"] += 100

    with pytest.raises(CheckpointError, match=r"'</think>' has id \d+, but would get \d+"):
        Tokenizer.from_json(json.dumps(description))


def test_truncation_and_padding_of_a_tokenizer_json_do_not_touch_prompts(byte_level_json: str) -> None:
    description = json.loads(byte_level_json)
    description["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    description["padding"] = padding | {"pad_type_id": 0, "pad_token": "<s>"}
    text = "a long text with more tokens than four"

    assert Tokenizer.from_json(json.dumps(description)).encode(text) == Tokenizer.from_json(byte_level_json).encode(
        text
    )


def test_ids_that_no_token_has_are_named() -> None:
    backend = Backend(models.BPE(vocab={"a": 0, "b": 3}, merges=[]))
    pipeline = TextPipeline(Tokenizer.from_json(backend.to_str()))

    assert pipeline.vocab_size == 4
    assert pipeline.missing_token_ids == {1, 2}
    assert pipeline.decode([0, 1, 3, 4]) == "a b"


def test_a_named_token_that_the_file_does_not_call_special_is_a_control_token(byte_level_json: str) -> None:
    tokenizer = Tokenizer.from_json(byte_level_json, named_tokens={"eos_token": "<think>", "pad_token": "[missing]"})

    assert tokenizer.token_id("<think>") in tokenizer.control_token_ids
    assert tokenizer.token_id("[missing]") is None


# Reading the output


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, None),
        (CHATML + "<think></think>", OutputFormat(reasoning_start="<think>", reasoning_end="</think>")),
        (CHATML + "<tool_call>", OutputFormat(tool_parser="hermes")),
    ],
)
def test_the_output_format_is_found_in_the_template(
    model_files: Callable[..., TextPipeline], template: str, expected: OutputFormat | None
) -> None:
    assert model_files({"chat_template": template}).output_format == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\nLet me", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n", False),
        ("no control tokens <think> here", False),
        ("no control tokens here <think>\n", True),
        ("", False),
    ],
)
def test_a_prompt_is_in_reasoning_if_its_last_turn_opened_a_section(
    model_files: Callable[..., TextPipeline], prompt: str, expected: bool
) -> None:
    pipeline = model_files({"chat_template": CHATML + "<think></think>"})
    ids = pipeline.tokenizer._ids(pipeline.tokenizer._backend, prompt)

    assert pipeline.prompt_in_reasoning(ids) is expected


def test_a_model_without_reasoning_is_never_in_it(chatml: TextPipeline) -> None:
    assert not chatml.prompt_in_reasoning(chatml.encode_text("<think>"))


def test_many_threads_get_what_one_gets(chatml: TextPipeline, mixed_texts: Callable[[int], list[str]]) -> None:
    chats = [ChatInput([Message("user", text + "<|im_end|>")]) for text in mixed_texts(200)]
    alone = [chatml.encode_chat(chat) for chat in chats]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(chatml.encode_chat, chats)) == alone


def test_the_package_exports_what_it_says() -> None:
    assert sorted(furnace.text.__all__) == furnace.text.__all__
    assert all(hasattr(furnace.text, name) for name in furnace.text.__all__)
