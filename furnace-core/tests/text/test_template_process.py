"""The worker process of templates: what it is given, when it ends, and what is left behind: nothing."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from furnace.contracts import ChatInput, Message, StepModel
from furnace.runtime import Scheduled
from furnace.text import ChatTemplate, TextPipeline, Tokenizer, WorkerRenderer
from furnace.text.chat_template import TemplateKilledError
from furnace.text.template_frames import (
    Load,
    Loaded,
    Refused,
    Render,
    Rendered,
    Reply,
    Request,
    Started,
    packed_json,
    packed_text,
    unpacked_json,
    unpacked_text,
)
from furnace.text.template_process import TemplateLimits

ENDLESS = "{% for a in range(99999) %}" * 5 + "{% endfor %}" * 5
# A chat with `bomb` goes off, all others are fine.
MAYBE = "{% if bomb == 'time' %}" + ENDLESS + "{% elif bomb %}{{ 'a' * 10 ** 9 }}{% endif %}{{ text }}"
QUICK = TemplateLimits(seconds=0.2)

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' memory limit and process files")


@pytest.fixture
def renderer() -> Iterator[WorkerRenderer]:
    made = WorkerRenderer({"default": MAYBE})
    yield made
    made.close()


def pids(renderer: WorkerRenderer) -> list[int]:
    """The processes of its workers, those that work first."""
    return [worker.pid for worker in (*renderer._pool._busy, *renderer._pool._idle)]


def exists(pid: int) -> bool:
    """Whether there is such a process, also a dead one that nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_end(pid: int) -> None:
    """Wait until a process that need not be a child of this one has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    ended = poll.poll(60_000)
    os.close(descriptor)
    assert ended, "it still runs after a minute"


# What is left behind


@linux
def test_many_killed_workers_leave_no_process_and_no_descriptor(renderer: WorkerRenderer) -> None:
    renderer.render({})
    gc.collect()  # what earlier tests left open
    before = len(os.listdir("/proc/self/fd"))
    seen = set()
    for number in range(20):
        seen.update(pids(renderer))
        if number % 2:
            os.kill(pids(renderer)[0], signal.SIGKILL)
            renderer.render({})
        else:
            with pytest.raises(TemplateKilledError):
                renderer.render({"bomb": "memory"})

    (last,) = pids(renderer)
    assert [pid for pid in seen - {last} if exists(pid)] == []
    assert len(os.listdir("/proc/self/fd")) == before
    renderer.close()
    assert not exists(last)
    assert len(os.listdir("/proc/self/fd")) == before - 2


def test_closing_ends_the_worker_and_the_next_chat_starts_one() -> None:
    renderer = WorkerRenderer({"default": "{{ text }}"})
    renderer.close()
    renderer.render({})
    (pid,) = pids(renderer)

    renderer.close()
    renderer.close()

    assert not exists(pid)
    assert renderer.render({"text": "x"}) == "x"
    renderer.close()


def test_a_renderer_that_is_garbage_ends_its_worker() -> None:
    renderer = WorkerRenderer({"default": "{{ text }}"})
    renderer.render({})
    (pid,) = pids(renderer)

    del renderer

    assert not exists(pid)


PARENT = """
import sys, threading
from furnace.text import WorkerRenderer
from furnace.text.template_process import TemplateLimits
renderer = WorkerRenderer({"default": sys.argv[2]}, limits=TemplateLimits(seconds=0.3))
renderer.render({})
print(renderer._pool._idle[0].pid, flush=True)
if sys.argv[1] == "busy":
    threading.Thread(target=renderer.render, args=({"bomb": "time"},), daemon=True).start()
    while not renderer._pool._busy:
        pass
if sys.argv[1] != "exit":
    print("ready", flush=True)
    threading.Event().wait()
"""


@linux
@pytest.mark.parametrize("state", ["idle", "busy", "exit"])
def test_a_worker_ends_with_its_parent_also_when_that_is_killed(state: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, state, MAYBE], stdout=subprocess.PIPE, text=True, env=environment()
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if state != "exit":
            assert parent.stdout.readline() == "ready\n"
            parent.kill()
        wait_for_end(pid)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


FORKS = """
import os, sys
from furnace.text import WorkerRenderer
renderer = WorkerRenderer({"default": "{{ text }}"})
renderer.render({})
before = renderer._pool._idle[0].pid
child = os.fork()
if child == 0:
    assert renderer.render({"text": "child"}) == "child"
    assert renderer._pool._idle[0].pid != before
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert renderer.render({"text": "parent"}) == "parent"
assert renderer._pool._idle[0].pid == before
"""


@linux
def test_a_forked_process_has_a_worker_of_its_own() -> None:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKS], capture_output=True, text=True, check=False, env=environment()
    )

    assert (result.returncode, result.stderr) == (0, "")


# The process


@linux
def test_the_worker_sees_no_environment_and_no_open_file_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, renderer: WorkerRenderer
) -> None:
    monkeypatch.setenv("API_KEY", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with open(tmp_path / "ours", "w") as ours:
        os.set_inheritable(ours.fileno(), True)
        renderer.render({})
    (pid,) = pids(renderer)

    process = Path("/proc", str(pid))
    names = {entry.partition("=")[0] for entry in (process / "environ").read_text().split("\0") if entry}
    # Python sets LC_CTYPE when there is no locale.
    assert names <= {"TZ", "LD_LIBRARY_PATH", "LC_CTYPE"}
    assert not any("ours" in os.readlink(link) for link in (process / "fd").iterdir())
    assert [os.readlink(process / "fd" / stream) for stream in "012"] == [os.devnull] * 3


@linux
def test_the_signals_of_a_group_do_not_end_the_worker(renderer: WorkerRenderer) -> None:
    renderer.render({})
    (pid,) = pids(renderer)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)

    assert renderer.render({"text": "x"}) == "x"
    assert pids(renderer) == [pid]
    assert os.getsid(pid) != os.getsid(0)


@linux
def test_a_blocked_or_ignored_alarm_of_ours_does_not_save_a_bomb() -> None:
    renderer = WorkerRenderer({"default": ENDLESS}, limits=QUICK)
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGPROF}).result()
            with pytest.raises(TemplateKilledError):
                threads.submit(renderer.render, {}).result()
    finally:
        signal.signal(signal.SIGPROF, before)
    renderer.close()


def test_the_worker_loads_no_tokenizer_and_no_framework() -> None:
    code = "import json, sys, furnace.text.template_child; print(json.dumps([*sys.modules]))"
    loaded = json.loads(subprocess.check_output([sys.executable, "-c", code], env=environment()))

    assert "furnace.text.template_sandbox" in loaded
    assert not {"numpy", "tokenizers", "huggingface_hub", "furnace.contracts", "furnace.checkpoint"} & {*loaded}


# Pipelines


def test_a_pipeline_starts_no_process_before_its_first_chat_and_ends_it_when_closed(
    byte_level_metadata: dict[str, object],
) -> None:
    pipeline = TextPipeline.from_gguf(byte_level_metadata)
    renderer = pipeline._renderer
    assert isinstance(renderer, WorkerRenderer)
    pipeline.encode_text("x")
    assert pids(renderer) == []

    ids = pipeline.encode_chat(ChatInput([Message("user", "x")]))
    (pid,) = pids(renderer)
    pipeline.close()
    pipeline.close()

    assert not exists(pid)
    assert ids == TextPipeline.from_gguf(byte_level_metadata, isolate=False).encode_chat(
        ChatInput([Message("user", "x")])
    )


def test_a_template_that_never_ends_costs_a_chat_one_limit_and_leaves_completions_alone(
    byte_level: Tokenizer,
) -> None:
    pipeline = TextPipeline(byte_level, WorkerRenderer({"default": ENDLESS}, limits=QUICK))

    for _ in range(2):
        with pytest.raises(TemplateKilledError, match="took more than"):
            pipeline.encode_chat(ChatInput([Message("user", "hi")]))

    assert pipeline.decode(pipeline.encode_text("hi")) == "hi"
    pipeline.close()


class OneToken(StepModel):
    """Always has the same next token."""

    name = "one-token"
    max_context = 100
    vocab_size = 10

    def prefill(self, prompt: Sequence[int]) -> tuple[object, Sequence[float]]:
        return None, [1.0] * self.vocab_size

    def decode(self, state: object, token: int) -> Sequence[float]:
        return [1.0] * self.vocab_size


async def test_closing_an_engine_closes_its_pipeline(byte_level_metadata: dict[str, object]) -> None:
    pipeline = TextPipeline.from_gguf(byte_level_metadata)
    engine = Scheduled(OneToken(), pipeline)
    await engine.start()
    await engine.tokenize(ChatInput([Message("user", "x")]))
    assert isinstance(pipeline._renderer, WorkerRenderer)
    (pid,) = pids(pipeline._renderer)

    await engine.aclose()

    assert not exists(pid)


class KilledOnce(ChatTemplate):
    """Takes parts only, and is killed the first time."""

    killed = False

    def render(self, variables: Mapping[str, object]) -> str:
        if not self.killed:
            self.killed = True
            raise TemplateKilledError("killed", param="messages")
        return super().render(variables)


def test_a_first_chat_that_is_killed_does_not_settle_what_the_template_takes(byte_level: Tokenizer) -> None:
    pipeline = TextPipeline(byte_level, KilledOnce({"default": "{{ messages[0].content[0].text }}"}))
    chat = ChatInput([Message("user", "hi")])

    with pytest.raises(TemplateKilledError):
        pipeline.encode_chat(chat)

    assert pipeline.decode(pipeline.encode_chat(chat)) == "hi"


# Frames

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters()), inner, max_size=3),
    max_leaves=10,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=())), plain, max_size=3))
def test_data_arrives_as_it_was_sent(value: dict[str, object]) -> None:
    assert unpacked_json(packed_json(value)) == value


@given(st.text(st.characters(exclude_categories=())))
def test_text_arrives_as_it_was_sent_lone_surrogates_too(text: str) -> None:
    assert unpacked_text(packed_text(text)) == text


@pytest.mark.parametrize(
    "message", [Load(b"{}", 2.0, 1, 1), Render(b"{}"), Started(), Loaded(), Rendered(b"x"), Refused(b"x", spent=True)]
)
def test_frames_survive_msgpack(message: Request | Reply) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Request | Reply) == message
