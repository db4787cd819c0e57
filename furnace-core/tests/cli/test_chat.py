"""``furnace chat`` as people and pipes use it: in a process of its own, on a terminal and without one."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Url = Callable[[subprocess.Popen[str]], str]


def piped(command: Any, *arguments: str, input: bytes) -> subprocess.CompletedProcess[bytes]:
    """Run a chat whose input is a pipe."""
    return subprocess.run(
        [sys.executable, "-m", "furnace", "chat", *arguments],
        env=command.env,
        input=input,
        capture_output=True,
        timeout=240,
    )


class Terminal:
    """A chat on a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], fd: int) -> None:
        self.process = process
        self._fd = fd
        self._shown = ""

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt_until(self, text: str) -> str:
        """Press Ctrl-C until the screen shows this: what comes just before ``input()`` waits is seen with the next key.

        Python's readline looks for signals when its wait for a key is interrupted, and at no other time.
        """
        self.process.send_signal(signal.SIGINT)
        while text not in self._shown:
            if select.select([self._fd], [], [], 5.0)[0]:
                self._read(text)
            else:
                self.process.send_signal(signal.SIGINT)
        return self._before(text)

    def wait_for(self, text: str) -> str:
        """Read until the screen shows this; gives what came before it, since the last time."""
        while text not in self._shown:
            self._read(text)
        return self._before(text)

    def _read(self, text: str) -> None:
        try:
            data = os.read(self._fd, 4096)
        except OSError:
            data = b""
        assert data, f"no {text!r} in {self._shown!r}"
        self._shown += data.decode()

    def _before(self, text: str) -> str:
        before, _, self._shown = self._shown.partition(text)
        return before


@contextmanager
def on_terminal(command: Any, *arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    env = {**command.env, "TERM": "dumb"}
    # A shell's background job begins with interrupts ignored, and so would what it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "furnace", "chat", *arguments], env=env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    signal.signal(signal.SIGINT, before)
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_each_line_of_a_pipe_is_answered_and_only_answers_go_to_the_output(command: Any) -> None:
    done = piped(command, "acme:demo", input=b"Hello\n\n/help\nBye")

    assert done.returncode == 0
    assert done.stdout == b"Hello\nBye\n"
    assert b"/clear" in done.stderr
    assert len(re.findall(rb"^\[.*first after \d+\.\d\d s.*\]$", done.stderr, re.MULTILINE)) == 2
    assert b"\x1b" not in done.stderr


def test_neither_a_model_nor_a_pipe_can_steer_the_terminal(command: Any) -> None:
    done = piped(command, "acme:demo", input=b"\x1b[31mred\xff\n")

    assert done.returncode == 0
    assert done.stdout.decode() == "\N{REPLACEMENT CHARACTER}[31mred\N{REPLACEMENT CHARACTER}\n"


def test_a_server_is_talked_to_by_its_url(command: Any, url_of: Url) -> None:
    url = url_of(command.start("serve", "-e", "acme:demo", "--port", "0"))
    done = piped(command, url, "--system", "Be brief", "--seed", "1", "--max-tokens", "9", input=b"Hello\n")

    assert (done.returncode, done.stdout) == (0, b"Hello\n")
    assert b"[1 + 1 tokens, first after " in done.stderr


def test_what_a_server_refuses_is_one_line(command: Any, url_of: Url) -> None:
    url = url_of(command.start("serve", "-e", "acme:demo", "--port", "0"))
    done = piped(command, url, "--model", "nobody", input=b"Hello\n")

    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"furnace: The server answers 404: ")
    assert done.stderr.count(b"\n") == 1


def test_mistakes_are_one_line(command: Any) -> None:
    for arguments, message in (
        (("http://127.0.0.1:1",), "can't be reached"),
        (("http://[::1",), "no URL of a server"),
        (("http://127.0.0.1:1", "--api-key-env", "NO_SUCH_VARIABLE"), "NO_SUCH_VARIABLE"),
        (("acme:demo", "--model", "x"), "are for a URL"),
        (("acme",), "write SCHEME:MODEL"),
    ):
        done = piped(command, *arguments, input=b"Hello\n")
        assert done.returncode == 2
        assert message in done.stderr.decode()
        assert done.stderr.count(b"\n") == 1


def test_on_a_terminal_an_interrupt_stops_the_answer_and_end_of_file_the_chat(command: Any) -> None:
    with on_terminal(command, "acme:endless") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for("Hello\r\n")  # the echo of what was typed
        terminal.wait_for("Hello")
        terminal.process.send_signal(signal.SIGINT)
        assert "1 + 1 tokens" in terminal.wait_for("stopped]")
        terminal.wait_for("> ")
        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.interrupt_until("> ")
        terminal.type("/clear\n")
        terminal.wait_for("> ")
        terminal.type("\x04")

        assert terminal.process.wait(240) == 0
