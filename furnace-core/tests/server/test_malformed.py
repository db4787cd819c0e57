"""Bodies that nobody should send: always a 4xx in OpenAI's shape, and nobody else notices."""

from __future__ import annotations

import http.client
import json
import random
import threading
import time

import msgspec
import pytest
from asgi_driver import PATIENCE, Driver, chat, completion, decode_events
from scripted_engine import Script, ScriptedEngine

from furnace.contracts import TextInput
from furnace.server import Server

PATHS = ("/v1/chat/completions", "/v1/completions")
WRONG = [None, True, 0, -1, 2**70, 10**400, 1.5, "", "x", "\0", "é", [], [1], [None], [[]], {}, {"a": 1}, [{}], [["x"]]]
RAW_VALUES = [
    b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e999", b"9" * 5000, b"01", b"+1", b"1.", b".5", b"0x10",
    b"'x'", b'"\\ud83d"', b'"\\udc00 x"', b'"\\ud83d\\ud83d"', b'"\xff"', b'"\xc3("', b'"\xed\xa0\x80"', b'"\0"',
    b'"\\u0000"', b'"\n"', b'"\\x41"', b'"unfinished', b"[" * 2000, b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000,
    b'{"a":' * 2000 + b"1" + b"}" * 2000, b"undefined", b"tru", b"{,}", b"[,]", b"[1,]", b'{"a" 1}', b"",
]  # fmt: skip
FIELDS = [
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids", "ignore_eos", "seed", "stop", "n", "stream",
    "stream_options",
]  # fmt: skip
OWN = {PATHS[0]: ["messages", "max_completion_tokens", "chat_template_kwargs", "documents", "tools", "tool_choice",
                  "response_format", "logprobs", "top_logprobs", "add_generation_prompt"],
       PATHS[1]: ["prompt", "echo", "suffix", "best_of", "logprobs"]}  # fmt: skip


def malformed(rng: random.Random, path: str) -> bytes:
    """A body that is broken in one of many ways, or at least strange."""
    body = chat() if path == PATHS[0] else completion()
    field = rng.choice(FIELDS + OWN[path])
    match rng.randrange(7):
        case 0:  # a wrong type somewhere
            body[field] = rng.choice(WRONG)
            return json.dumps(body).encode()
        case 1:  # a value that is no JSON, or more than a number can be
            body.pop(field, None)
            text = json.dumps(body).encode()[:-1]
            return text + b',"' + field.encode() + b'":' + rng.choice(RAW_VALUES) + b"}"
        case 2:  # cut off
            text = json.dumps(body).encode()
            return text[: rng.randrange(len(text))]
        case 3:  # one byte is another
            text = bytearray(json.dumps(body).encode())
            text[rng.randrange(len(text))] = rng.randrange(256)
            return bytes(text)
        case 4:  # noise
            return rng.randbytes(rng.randrange(60))
        case 5:  # a wrong type deep inside
            wrong = rng.choice(WRONG)
            message = {"role": "user", "content": [{"type": "text", "text": "x"}], "tool_calls": None}
            key = rng.choice(["role", "content", "tool_calls", "tool_call_id", "name"])
            message[key] = rng.choice([wrong, [{"type": wrong, "text": wrong}], [{"id": wrong, "function": wrong}]])
            body["messages" if path == PATHS[0] else "prompt"] = [message] * rng.randrange(1, 3)
            return json.dumps(body).encode()
        case _:  # something else altogether
            return json.dumps(rng.choice(WRONG)).encode()


def check(status: int, body: bytes) -> bool:
    """A success, or a 4xx in the right shape; says whether it was refused."""
    if status == 200:
        return False
    assert status in {400, 404}, (status, body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert isinstance(error["message"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert len(error["message"]) < 600
    for leaked in (
        "Traceback",
        ".py",
        "msgspec",
        "Struct",
        "object at",
        "/home",
        "/root",
        "python",
        "`int`",
        "`object`",
        "$.",
    ):
        assert leaked not in error["message"], error["message"]
    return True


@pytest.mark.parametrize("path", PATHS)
def test_ten_thousand_malformed_bodies_are_never_a_5xx(path):
    rng = random.Random(path)
    engine = ScriptedEngine()

    async def test(driver):
        refused = 0
        for _ in range(10_000):
            body = malformed(rng, path)
            reply = await driver.call(path, body)
            assert reply.complete, body
            try:
                refused += check(reply.status, reply.body)
            except AssertionError as error:
                raise AssertionError(body[:300]) from error
        assert refused > 8000
        assert not engine.open
        assert driver.server.metrics("scripted").running == 0
        assert driver.server.metrics("scripted").finished.error == 0

    Driver(engine).run(test)


def test_many_malformed_bodies_leave_a_stream_beside_them_undisturbed():
    engine = ScriptedEngine()
    words = [f"w{i} " for i in range(2000)]
    engine.choose = lambda request: Script(words) if request.params.seed == 1 else Script()
    rng = random.Random(1)
    with Server(port=0).llm(engine).background() as server:
        address = server.url.removeprefix("http://")
        streamed = []

        def listen():
            connection = http.client.HTTPConnection(address, timeout=PATIENCE)
            body = json.dumps(completion(stream=True, seed=1, max_tokens=10**6))
            connection.request("POST", PATHS[1], body, {"Content-Type": "application/json"})
            streamed.append(connection.getresponse().read())
            connection.close()

        listener = threading.Thread(target=listen)
        listener.start()
        connection = http.client.HTTPConnection(address, timeout=PATIENCE)
        for index in range(400):
            path = PATHS[index % 2]
            connection.request("POST", path, malformed(rng, path), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            check(answer.status, answer.read())
        connection.close()
        listener.join()
    events = decode_events(streamed[0])
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == "".join(words)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 4_000_000,
        b'{"a":' * 800_000,
        b'{"model":"scripted","prompt":[' + b"1," * 1_500_000 + b'"x"]}',
        b'{"model":"scripted","prompt":"' + b"a" * 4_000_000,
        b'{"model":"scripted","messages":5,' + b",".join(b'"k%d":1' % i for i in range(250_000)) + b"}",
        b'{"model":"scripted","prompt":"x","n":' + b"9" * 4_000_000 + b"}",
        b"\xff" * 4_000_000,
        b'{"model":"scripted","prompt":[' + b"[]," * 1_300_000 + b"[]]}",
        b'{"model":"scripted","messages":[' + b'{"role":""},' * 300_000 + b"{}]}",
        b'{"model":"scripted","prompt":[' + b'"",' * 1_000_000 + b'""]}',
        b'{"model":"scripted","zz":{' + b",".join(b'"%d":1' % i for i in range(300_000)) + b"}}",
    ],
    ids=[
        "arrays",
        "objects",
        "many tokens",
        "unfinished",
        "many keys",
        "long number",
        "no text",
        "many lists",
        "many messages",
        "many strings",
        "many unknown keys",
    ],
)
def test_large_hostile_bodies_are_refused_quickly(body):
    async def test(driver):
        spent = []
        for _ in range(5):
            started = time.process_time()
            for path in PATHS:
                assert (await driver.call(path, body)).status == 400
            spent.append(time.process_time() - started)
            # The bar is 50 ms each; a shared machine gets more. What it does for others does not count.
            if spent[-1] < 1:
                return
        raise AssertionError(f"seconds: {spent}")

    Driver(ScriptedEngine()).run(test)


@pytest.mark.parametrize("half", [b"\\ud83d", b"a \\udc00 b", b"\xed\xa0\xbd"])
def test_half_of_a_surrogate_pair_is_a_400_in_every_string(half):
    async def test(driver):
        for path, body in zip(PATHS, (chat, completion), strict=True):
            for field in (b"hi there", b"scripted", b"me", b"unknown"):
                sent = json.dumps(body(user="me", other="unknown")).encode()
                reply = await driver.call(path, sent.replace(b'"' + field + b'"', b'"' + half + b'"'))
                assert reply.status == 400, field
                assert reply.error["type"] == "invalid_request_error"

    engine = ScriptedEngine()
    Driver(engine).run(test)
    assert not engine.requests


def test_no_route_tells_anything_about_its_insides():
    async def test(driver):
        for path in (*PATHS, "/v1/models", "/healthz", "/docs"):
            for method in ("POST", "GET", "PUT"):
                reply = await driver.call(path, b'{"broken', method=method)
                if reply.status >= 400:
                    text = reply.body.decode().lower()
                    for secret in ("traceback", ".py", "line ", "handler", "litestar", "msgspec", "/root", "3.11"):
                        assert secret not in text, text

    Driver(ScriptedEngine()).run(test)


def test_a_large_prompt_is_no_hostile_body():
    text = 'say "hi", [a, {b}] \\ \n é ' * 150_000
    requests = []

    async def test(driver):
        for prompt in (text[:3_000_000], [text[:1000]] * 1000):
            assert (await driver.call(PATHS[1], completion(prompt=prompt))).status == 200
        messages = [{"role": "user", "content": 'a "quoted" word, and [more]'}] * 5000
        assert (await driver.call(PATHS[0], chat(messages=messages))).status == 200
        requests.extend(engine.requests)

    engine = ScriptedEngine()
    generate = engine.generate

    async def generate_any(request):
        return await generate(msgspec.structs.replace(request, input=TextInput("x")))

    engine.generate = generate_any
    Driver(engine).run(test)
    assert len(requests) == 1002
