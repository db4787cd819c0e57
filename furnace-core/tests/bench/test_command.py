from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from furnace.bench import ClosedLoop, OpenLoop, Report
from furnace.cli import main
from furnace.server import Server

SLACK = 240
"""Seconds after which a test that hangs is a failure; no result depends on them."""

ENV = {**os.environ, "PYTHONWARNINGS": "error::ResourceWarning"}
SHORT = ("--prompt-tokens", "60", "--output-tokens", "5")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(port=0).llm("mock:lorem").background() as running:
        yield running


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "furnace", "bench", *arguments]
    return subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=SLACK)


def test_it_measures_each_load_and_writes_json(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    done = bench(server.url, "--concurrency", "1,4", "--requests", "8", "--seed", "3", *SHORT, "--json", str(path))

    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "TOK/S" in done.stdout
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert [measurement.load for measurement in report.measurements] == [ClosedLoop(1), ClosedLoop(4)]
    for measurement in report.measurements:
        assert (measurement.all.succeeded, measurement.all.failed) == (8, {})
        assert measurement.all.completion_tokens == 8 * 5
        assert measurement.all.prompt_tokens / 8 == pytest.approx(60, abs=3)
    assert report.workload.seed == 3
    assert report.servers[0].model == "lorem"


def test_it_measures_an_open_loop_of_completions(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    arguments = ("--rate", "50", "--requests", "6", "--endpoint", "completions", "--json", str(path))
    done = bench(server.url + "/v1", "-m", "lorem", *arguments, *SHORT)

    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert report.measurements[0].load == OpenLoop(50.0)
    assert report.measurements[0].all.succeeded == 6


def test_it_compares_two_servers(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "result.json"

    done = bench(server.url, "--against", server.url, "-n", "4", "--rounds", "3", *SHORT, "--json", str(path))

    assert done.returncode == 0, done.stderr
    assert "A/B" in done.stdout
    report = msgspec.json.decode(path.read_bytes(), type=Report)
    assert [len(measurement.rounds) for measurement in report.measurements] == [3, 3]
    assert {ratio.metric for ratio in report.comparisons[0].ratios} >= {"output_rate", "ttft", "e2e"}


def test_ctrl_c_prints_what_was_measured_so_far(server: Server) -> None:
    before = server.metrics("lorem").finished.total
    command = [sys.executable, "-m", "furnace", "bench", server.url, "--duration", "600", "--warmup", "0", *SHORT]
    process = subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        # The first two are there to calibrate.
        while server.metrics("lorem").finished.total < before + 5:
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=SLACK)
    finally:
        process.kill()

    assert (process.returncode, err) == (0, "")
    assert "TTFT ms" in out
    assert "note: stopped early (interrupted)" in out


def test_an_unknown_model_is_one_line_and_exit_code_2(server: Server) -> None:
    done = bench(server.url, "--model", "no-such-model")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("furnace: ")
    assert "404" in done.stderr
    assert done.stderr.count("\n") == 1


def test_nobody_at_the_address_is_one_line_and_exit_code_2() -> None:
    done = bench("http://127.0.0.1:1")

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "furnace: http://127.0.0.1:1 can't be reached: connection refused\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--concurrency", "1", "--rate", "2"), "--concurrency and --rate exclude each other"),
        (("--concurrency", "1,x"), "--concurrency takes numbers with commas between them, not '1,x'"),
        (("--concurrency", "0"), "a concurrency of 0 can't be: it is at least 1"),
        (("--rate", "nan"), "a rate of nan requests a second can't be: it is above 0"),
        (("--prompt-tokens", "many"), "'many' is no length: write a number of tokens, such as 130, or 100:200"),
        (("--against-model", "m"), "there is no second server; name it with --against URL"),
        (("--api-key-env", "NO_SUCH_KEY"), "the environment variable NO_SUCH_KEY with the API key is not set"),
        (("--json", "no/such/folder/x.json"), "there is no directory no/such/folder for x.json"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "http://127.0.0.1:1", *arguments]) == 2

    assert tuple(capsys.readouterr()) == ("", f"furnace: {message}\n")


def test_a_benchmark_of_failures_shows_them_and_is_no_success() -> None:
    # The requests that calibrate ask for two tokens.
    with Server(port=0).llm("mock:lorem?fail_at=3").background() as server:
        done = bench(server.url, "-n", "2", "--warmup", "0", *SHORT)

    assert done.returncode == 2
    # Where one stands in its stream when the model fails is a race: they may differ in what they say of it.
    assert sum(map(int, re.findall(r"note: A, 1 client: (\d) failed", done.stdout))) == 2
    assert done.stderr == "furnace: no request succeeded\n"


def test_help_imports_no_array_library_no_server_and_no_load_generator() -> None:
    code = "import sys; from furnace.cli import main; main(['bench', '--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=SLACK)

    assert "--against" in done.stdout
    heavy = {"numpy", "litestar", "uvicorn", "matplotlib", "asyncio", "msgspec", "rich", "furnace.bench"}
    assert not heavy & set(done.stderr.split())


def test_measuring_imports_neither_numpy_nor_the_server() -> None:
    code = (
        "import sys; from furnace.bench import plot, progress, session, table; from furnace.cli import bench; "
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, timeout=SLACK)

    assert done.returncode == 0, done.stderr
    assert not {"numpy", "litestar", "uvicorn", "tokenizers", "matplotlib"} & set(done.stdout.split())
