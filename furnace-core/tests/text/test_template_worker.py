"""Templates that take too much, and workers that die."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from furnace.checkpoint import CheckpointError
from furnace.contracts import EngineUnavailableError, InvalidRequestError
from furnace.text import WorkerRenderer, template_process
from furnace.text.chat_template import TemplateKilledError
from furnace.text.template_process import TemplateLimits, TemplateProcess

ENDLESS = "{% for a in range(99999) %}" * 5 + "{% endfor %}" * 5
# A chat with `bomb` goes off, all others are fine.
MAYBE = "{% if bomb == 'time' %}" + ENDLESS + "{% elif bomb %}{{ 'a' * 10 ** 9 }}{% endif %}{{ text }}"
QUICK = TemplateLimits(seconds=0.2)
NEVER = TemplateLimits(seconds=1e6)

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux' memory limit and process files")


@pytest.fixture
def renderer() -> Iterator[WorkerRenderer]:
    made = WorkerRenderer({"default": MAYBE}, limits=TemplateLimits(seconds=0.5))
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


def busy_worker(renderer: WorkerRenderer, rendering: Future[str]) -> TemplateProcess:
    """The worker that has the rendering, once it has it."""
    while True:
        with renderer._pool._lock:
            for worker in renderer._pool._busy:
                if worker._loaded:
                    return worker
        wait([rendering], timeout=0.01)
        assert not rendering.done()


# Bombs


@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{{ messages[0].n ** (messages[0].n ** 9) }}",  # one operation that never comes back to the interpreter
        "{{ 7 ** (9 ** 9) }}",  # goes off while it is compiled
    ],
)
def test_a_template_that_never_ends_is_killed_at_its_limit(source: str) -> None:
    renderer = WorkerRenderer({"default": source}, limits=QUICK)

    with pytest.raises(TemplateKilledError, match=r"took more than 0.2 seconds") as caught:
        renderer.render({"messages": [{"n": 99}]})

    assert (caught.value.status, caught.value.param) == (400, "messages")
    renderer.close()


@linux
@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{{ text | replace('a', text) }}",
    ],
)
def test_a_template_that_takes_all_memory_is_stopped(source: str) -> None:
    renderer = WorkerRenderer({"default": source}, limits=TemplateLimits(seconds=60))

    with pytest.raises(TemplateKilledError, match="needs more memory") as caught:
        renderer.render({"text": "a" * 50_000})

    assert (caught.value.status, caught.value.param) == (400, "messages")
    renderer.close()


@linux
def test_a_bomb_costs_one_request_and_the_next_finds_another_worker(renderer: WorkerRenderer) -> None:
    assert renderer.render({"text": "before"}) == "before"
    (first,) = pids(renderer)

    for bomb in ("memory", "time"):
        with pytest.raises(TemplateKilledError):
            renderer.render({"bomb": bomb})
        assert renderer.render({"text": "after"}) == "after"

    assert first not in pids(renderer)
    assert not exists(first)


def test_output_beyond_the_limit_is_refused_and_the_longest_one_arrives_whole() -> None:
    renderer = WorkerRenderer({"default": "{{ text }}{{ text }}"}, limits=TemplateLimits(seconds=60))
    half = "\U0001f600" * (4 * 1024 * 1024)

    assert renderer.render({"text": half}) == half * 2
    with pytest.raises(InvalidRequestError, match="more than 8388608 characters"):
        renderer.render({"text": half + "x"})
    renderer.close()


def test_what_only_compiling_finds_refuses_each_request_and_no_worker_dies_of_it() -> None:
    renderer = WorkerRenderer({"default": "{% for a in x %}" * 30 + "{% endfor %}" * 30})

    for _ in range(2):
        with pytest.raises(InvalidRequestError, match="nested too deeply to compile"):
            renderer.render({})
    assert len(pids(renderer)) == 1
    renderer.close()


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ({"default": "{% if x %}\n{% endfor %}"}, "'default' has a syntax error in line 2"),
        ({"default": "{% if x %}" * 5_000 + "{% endif %}" * 5_000}, "nested too deeply"),
        ({"default": "{{ " + "9" * 5_000 + " }}"}, "can't be compiled"),
        ({"default": "x" * 600_000}, "more than 524288 characters"),
        ({"tool_use": "", "rag": ""}, "'rag', 'tool_use'"),
    ],
)
def test_a_template_that_can_not_be_read_is_found_when_it_is_loaded(sources: dict[str, str], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        WorkerRenderer(sources)


# At once


@linux
def test_with_bombs_among_many_requests_at_once_all_others_are_right(renderer: WorkerRenderer) -> None:
    def one(number: int) -> str:
        bomb = {20: "memory", 40: "time", 60: "memory"}.get(number)
        return renderer.render({"text": f"é {number}" * (number * 100), "bomb": bomb})

    with ThreadPoolExecutor(16) as threads:
        futures = [threads.submit(one, number) for number in range(120)]

    for number, future in enumerate(futures):
        if number in (20, 40, 60):
            assert isinstance(future.exception(), TemplateKilledError)
        else:
            assert future.result() == f"é {number}" * (number * 100)
    assert len(pids(renderer)) <= 2


def test_others_render_while_one_template_does_not_end_and_closing_ends_that_one() -> None:
    renderer = WorkerRenderer({"default": MAYBE}, limits=NEVER)
    with ThreadPoolExecutor(1) as threads:
        bomb = threads.submit(renderer.render, {"bomb": "time"})
        worker = busy_worker(renderer, bomb)

        assert [renderer.render({"text": str(number)}) for number in range(50)] == [str(n) for n in range(50)]

        assert not bomb.done()
        renderer.close()
        with pytest.raises(EngineUnavailableError) as caught:
            bomb.result()
    assert caught.value.code == "shutting_down"
    assert not exists(worker.pid)
    assert pids(renderer) == []


# Workers that die


def test_a_worker_that_is_killed_while_idle_costs_no_request(renderer: WorkerRenderer) -> None:
    for number in range(5):
        assert renderer.render({"text": str(number)}) == str(number)
        for pid in pids(renderer):
            os.kill(pid, signal.SIGKILL)
    assert renderer.render({"text": "x"}) == "x"


def test_a_replacement_that_is_killed_before_it_was_used_costs_no_request(renderer: WorkerRenderer) -> None:
    renderer._pool._idle.append(TemplateProcess(TemplateLimits()))
    os.kill(pids(renderer)[0], signal.SIGKILL)

    assert renderer.render({"text": "x"}) == "x"


@linux
def test_a_request_whose_worker_is_killed_is_rendered_by_another() -> None:
    renderer = WorkerRenderer({"default": MAYBE}, limits=NEVER)
    renderer.render({})
    (pid,) = pids(renderer)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as threads:
        rendering = threads.submit(renderer.render, {"text": "x" * 1_000_000})
        busy_worker(renderer, rendering)
        os.kill(pid, signal.SIGKILL)

        assert rendering.result() == "x" * 1_000_000
    renderer.close()


def test_a_request_whose_workers_are_killed_twice_is_refused() -> None:
    renderer = WorkerRenderer({"default": MAYBE}, limits=NEVER)
    with ThreadPoolExecutor(1) as threads:
        rendering = threads.submit(renderer.render, {"bomb": "time"})
        first = busy_worker(renderer, rendering)
        os.kill(first.pid, signal.SIGKILL)
        while (second := busy_worker(renderer, rendering)) is first:
            pass
        os.kill(second.pid, signal.SIGKILL)

        with pytest.raises(TemplateKilledError, match="breaks the process"):
            rendering.result()

    assert renderer.render({"text": "x"}) == "x"
    renderer.close()


def test_a_worker_that_is_stopped_is_given_up(renderer: WorkerRenderer) -> None:
    renderer.render({})
    (worker,) = renderer._pool._idle
    worker._limits = TemplateLimits(seconds=0.1, stall_seconds=0.1)
    os.kill(worker.pid, signal.SIGSTOP)

    with pytest.raises(TemplateKilledError, match="took more than"):
        renderer.render({"text": "x"})

    assert not exists(worker.pid)


def processor_seconds(pid: int) -> float:
    """What a process has used."""
    fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@linux
def test_time_in_which_a_worker_does_not_run_is_not_the_templates() -> None:
    limit = 1.0
    renderer = WorkerRenderer(
        {"default": "{% for a in range(n) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ n }}"},
        limits=TemplateLimits(seconds=limit, stall_seconds=100),
    )
    renderer.render({"n": 0})
    (pid,) = pids(renderer)
    stopped = False
    n = 8
    while not stopped:
        n *= 2
        before = processor_seconds(pid)
        with ThreadPoolExecutor(1) as threads:
            rendering = threads.submit(renderer.render, {"n": n})
            while processor_seconds(pid) == before and not rendering.done():
                wait([rendering], timeout=0.001)
            os.kill(pid, signal.SIGSTOP)
            wait([rendering], timeout=1.5 * limit)
            stopped = not rendering.done()
            os.kill(pid, signal.SIGCONT)

            assert rendering.result() == str(n)
    renderer.close()


class Interrupt(BaseException):
    """As an interrupt from the keyboard."""


def test_an_interrupted_rendering_leaves_no_answer_for_the_next() -> None:
    renderer = WorkerRenderer({"default": MAYBE}, limits=NEVER)
    renderer.render({})
    main = threading.get_ident()

    def interrupt(number: int, frame: object) -> None:
        raise Interrupt

    def interrupt_rendering() -> None:
        while sys._current_frames()[main].f_code is not template_process._wait.__code__:
            pass
        signal.pthread_kill(main, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        interrupter = threading.Thread(target=interrupt_rendering)
        interrupter.start()
        with pytest.raises(Interrupt):
            renderer.render({"bomb": "time"})
        interrupter.join()
    finally:
        signal.signal(signal.SIGALRM, before)

    assert renderer.render({"text": "x"}) == "x"
    renderer.close()


@pytest.mark.parametrize("executable", ["/nonexistent/python", "/bin/false", "/bin/echo"])
def test_a_worker_that_can_not_be_started_makes_chats_unavailable(
    monkeypatch: pytest.MonkeyPatch, executable: str, renderer: WorkerRenderer
) -> None:
    monkeypatch.setattr(sys, "executable", executable)

    with pytest.raises(EngineUnavailableError, match="does not start"):
        renderer.render({})

    monkeypatch.undo()
    assert renderer.render({"text": "x"}) == "x"
