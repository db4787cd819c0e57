from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from furnace.cli import main
from furnace.cli.serve import _allow_connections

UrlOf = Callable[[Any], str]


def models(url: str) -> list[str]:
    """What a client sees in the list of models."""
    return [model["id"] for model in httpx.get(f"{url}/v1/models", timeout=60).json()["data"]]


def test_it_says_where_it_serves_and_ends_cleanly_on_ctrl_c(command: Any, url_of: UrlOf) -> None:
    process = command.start("serve", "--engine", "acme:demo", "--port", "0")
    url = url_of(process)
    answer = httpx.post(
        f"{url}/v1/chat/completions",
        json={"model": "demo", "messages": [{"role": "user", "content": "hello"}]},
        timeout=60,
    )
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert out == ""
    assert err.splitlines()[0] == "furnace: demo: loading weights"
    assert err.splitlines()[1].startswith("furnace: demo: loading weights: done in ")
    assert "Traceback" not in err


def test_the_line_has_the_names_and_the_url(command: Any) -> None:
    process = command.start("serve", "-e", "one=acme:demo", "-e", "two=acme:demo", "--port", "0")
    line = process.stdout.readline()
    assert line.startswith("furnace: serving one, two on http://127.0.0.1:")
    assert models(line.split()[-1]) == ["one", "two"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_while_a_stream_runs(command: Any, url_of: UrlOf, number: signal.Signals) -> None:
    process = command.start("serve", "-e", "acme:endless", "--port", "0")
    url = url_of(process)
    body = {"model": "endless", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        assert "hello" in next(line for line in lines if "content" in line and "hello" in line)
        process.send_signal(number)
        while httpx.get(f"{url}/readyz", timeout=60).status_code != 503:
            pass  # a second signal would be lost in the first until that has arrived
        process.send_signal(number)
        rest = list(lines)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0
    assert any('"error"' in line for line in rest)
    assert "Traceback" not in err


def test_ctrl_c_ends_it_while_a_model_loads(command: Any) -> None:
    process = command.start("serve", "-e", "acme:forever", "--port", "0")
    while "done" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_options_and_settings_reach_the_engine(command: Any, url_of: UrlOf, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("T")
    process = command.start(
        *("serve", "--port", "0", "-e", "a=acme:demo", "-e", "acme:demo?name=b", "-e", "acme:context"),
        *("-o", "size=2", "-o", "a.size=3", "--chat-template", str(template)),
        *("--threads", "3", "--max-context", "40", "--kv-tokens", "80"),
    )
    assert models(url_of(process)) == ["a", "b", "3-40-80-T"]


def test_a_bound_that_an_engine_cannot_take_is_told(command: Any, url_of: UrlOf) -> None:
    process = command.start("serve", "-e", "acme:demo", "--port", "0", "--max-queue", "3")
    url_of(process)
    process.send_signal(signal.SIGINT)
    assert "max_queue is not used" in process.communicate(timeout=60)[1]


def test_an_open_address_without_keys_is_a_warning(command: Any, url_of: UrlOf) -> None:
    process = command.start("serve", "-e", "acme:demo", "--host", "0.0.0.0", "--port", "0")
    url_of(process)
    process.send_signal(signal.SIGINT)
    assert "there are no keys" in process.communicate(timeout=60)[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no engine to serve"),
        (["-e", "tiny-lm"], "write SCHEME:MODEL"),
        (["acme:demo"], "a model is given with --engine: furnace serve --engine 'acme:demo'"),
        (["-e", "acme:"], "names no model"),
        (["-e", "absent:tiny-lm"], "perhaps its package is named furnace-absent"),
        (["-e", "acme:demo?sze=3"], "did you mean 'size'?"),
        (["-e", "acme:demo", "-o", "size=big"], "option size is int, not 'big'"),
        (["-e", "acme:demo", "-o", "size"], "write KEY=VALUE"),
        (["-e", "acme:demo", "-o", "other.size=1"], "is for no engine"),
        (["-e", "a=acme:demo", "-e", "a=acme:endless"], "two engines have the name 'a'"),
        (["-e", "acme:demo", "-e", "acme:demo"], "two engines have the name 'demo'; give one another: NAME=SPEC"),
        (["-e", "acme:missing"], "acme:missing: No such file or directory: missing.gguf"),
        (["-e", "acme:unstartable"], "no device"),
        (["-e", "python:missing.py:engine"], "there is no file missing.py"),
        (["-e", "acme:demo", "--chat-template", "missing.jinja"], "'missing.jinja' does not exist"),
        (["-e", "acme:demo", "--chat-template", "latin1.jinja"], "latin1.jinja is not UTF-8"),
        (["-e", "acme:demo", "--host", "256.1.1.1"], "can't listen on 256.1.1.1:0"),
    ],
)
def test_what_the_operator_can_put_right_is_one_line_and_exit_code_2(
    command: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(command.site)
    (tmp_path / "latin1.jinja").write_bytes(b"\xff")
    assert main(["serve", "--port", "0", *arguments]) == 2
    sys.modules.pop("acme_engine", None)
    captured = capsys.readouterr()
    *before, line = captured.err.splitlines()
    assert message in line
    assert line.startswith("furnace: ")
    assert all("loading weights" in earlier for earlier in before)
    assert captured.out == ""


def test_a_port_in_use_is_told_before_anything_is_loaded(command: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = command("serve", "-e", "acme:demo", "--port", str(port))
        assert done.stderr == f"furnace: can't listen on 127.0.0.1:{port}: Address already in use\n"
        assert done.returncode == 2
        shown = command("serve", "-e", "acme:demo", "--port", str(port), "--debug")
    assert "Traceback" in shown.stderr
    assert shown.returncode == 2


def test_where_the_limit_of_descriptors_can_not_be_taken_whole_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    unlimited = 2**63 - 1
    taken: list[tuple[int, int]] = []

    def set_limit(kind: int, limits: tuple[int, int]) -> None:
        if limits[0] == unlimited:
            raise ValueError("current limit exceeds maximum limit")
        taken.append(limits)

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, unlimited))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    _allow_connections()
    assert taken == [(65_536, unlimited)]
