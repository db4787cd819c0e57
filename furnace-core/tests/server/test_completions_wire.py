"""The completions API, line by line."""

from __future__ import annotations

import asyncio

import pytest
from asgi_driver import Driver, completion
from scripted_engine import Script, ScriptedEngine

from furnace.contracts import EngineBusyError, EngineFailedError, InvalidRequestError, TextInput, TokenInput


def run(engine, test):
    Driver(engine).run(test)


def test_a_response_in_one_piece_has_openais_shape():
    async def test(driver):
        reply = await driver.call("/v1/completions", completion())
        body = reply.json
        assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
        assert body["object"] == "text_completion"
        assert body["id"].startswith("cmpl-")
        assert body["choices"] == [{"text": "Hello, world", "index": 0, "logprobs": None, "finish_reason": "stop"}]
        assert body["usage"]["total_tokens"] == 5

    run(ScriptedEngine(), test)


def test_a_stream_has_the_same_object_and_ends_with_a_reason_and_done():
    async def test(driver):
        reply = await driver.call("/v1/completions", completion(stream=True, stream_options={"include_usage": True}))
        *chunks, usage, done = reply.events
        assert done == "[DONE]"
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == 3
        assert {chunk["object"] for chunk in chunks} == {"text_completion"}
        assert [chunk["usage"] for chunk in chunks] == [None] * 4
        choices = [chunk["choices"][0] for chunk in chunks]
        assert [choice["text"] for choice in choices] == ["Hello", ",", " world", ""]
        assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
        assert all(set(choice) == {"text", "index", "logprobs", "finish_reason"} for choice in choices)

    run(ScriptedEngine(), test)


def test_max_tokens_is_16_when_it_is_not_given():
    engine = ScriptedEngine()

    async def test(driver):
        await driver.call("/v1/completions", completion())
        await driver.call("/v1/completions", completion(max_tokens=None))
        await driver.call("/v1/completions", completion(max_tokens=5))
        assert [request.params.max_tokens for request in engine.requests] == [16, 16, 5]

    run(engine, test)


@pytest.mark.parametrize(
    ("prompt", "inputs"),
    [
        ("a b", [TextInput("a b")]),
        (["a", "b"], [TextInput("a"), TextInput("b")]),
        ([65, 66], [TokenInput([65, 66])]),
        ([[65], [66, 67]], [TokenInput([65]), TokenInput([66, 67])]),
    ],
)
def test_a_prompt_is_text_texts_tokens_or_lists_of_tokens(prompt, inputs):
    engine = ScriptedEngine()

    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=prompt))
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(len(inputs)))
        assert [request.input for request in engine.requests] == inputs

    run(engine, test)


def test_usage_of_several_prompts_is_their_sum():
    async def test(driver):
        usage = (await driver.call("/v1/completions", completion(prompt=["a b", "c"]))).json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 6, 9)

    run(ScriptedEngine(), test)


def test_several_prompts_stream_side_by_side_and_each_keeps_its_order():
    engine = ScriptedEngine()
    engine.choose = lambda request: Script([f"{request.input.text}{i} " for i in range(20)])
    prompts = [f"p{i}-" for i in range(8)]

    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=prompts, stream=True))
        texts = dict.fromkeys(range(8), "")
        for chunk in reply.events[:-1]:
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == {i: "".join(f"p{i}-{k} " for k in range(20)) for i in range(8)}

    run(engine, test)


@pytest.mark.parametrize("stream", [False, True])
def test_one_failing_prompt_fails_the_response_and_cancels_the_others(stream):
    engine = ScriptedEngine()
    engine.choose = lambda request: (
        Script([EngineFailedError("boom")]) if request.input.text == "bad" else Script([], never_ends=True)
    )

    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=["good", "bad"], stream=stream))
        error = reply.events[-1]["error"] if reply.status == 200 else reply.error
        assert error["code"] == "engine_failed"
        assert not engine.open
        assert engine.generations[0].closed

    run(engine, test)


def test_something_cancelled_inside_an_engine_fails_the_response_and_does_not_hang():
    engine = ScriptedEngine(script=Script([], never_ends=True))
    generate = engine.generate

    async def generate_broken(request):
        generation = await generate(request)
        if request.input.text == "bad":

            async def cancelled():
                raise asyncio.CancelledError

            generation.batch = cancelled
        return generation

    engine.generate = generate_broken

    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=["good", "bad"]))
        assert reply.status == 500
        assert not engine.open

    run(engine, test)


def test_all_prompts_are_admitted_or_none():
    engine = ScriptedEngine()
    engine.choose = lambda request: (
        Script(refusal=EngineBusyError("full")) if request.input.text == "b" else Script([], never_ends=True)
    )

    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=["a", "b"]))
        assert reply.status == 503
        assert not engine.open

    run(engine, test)


def test_more_prompts_than_the_engine_can_ever_queue_are_a_400_that_names_the_prompt():
    refusal = InvalidRequestError("300 completions in one request can never fit the queue of 256.", param="n")

    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=["a"] * 300))
        assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "invalid_value", "prompt")

    run(ScriptedEngine(script=Script(refusal=refusal)), test)


@pytest.mark.parametrize(("prompt", "text"), [("hi ", "hi "), ([104, 105], "hi")])
def test_echo_puts_the_prompt_before_the_output(prompt, text):
    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=prompt, echo=True))
        assert reply.json["choices"][0]["text"] == text + "Hello, world"
        streamed = await driver.call("/v1/completions", completion(prompt=prompt, echo=True, stream=True))
        assert streamed.events[0]["choices"][0]["text"] == text + "Hello"

    run(ScriptedEngine(), test)


def test_echo_is_there_when_nothing_is_generated():
    async def test(driver):
        streamed = await driver.call("/v1/completions", completion(echo=True, stream=True))
        assert [chunk["choices"][0]["text"] for chunk in streamed.events[:-1]] == ["hi there"]

    run(ScriptedEngine(script=Script([])), test)


def test_token_ids_are_not_echoed_by_an_engine_that_cannot_detokenize():
    async def test(driver):
        reply = await driver.call("/v1/completions", completion(prompt=[104], echo=True))
        assert reply.status == 400
        assert reply.error["param"] == "echo"

    run(ScriptedEngine(tokenize=False), test)
