"""``furnace serve --record`` and ``furnace replay``, as an operator uses them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import openai
import pytest

SECRET = "the prompt that must not be written"


def furnace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "furnace", *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("where", [[], ["--in-process"]])
def test_a_recorded_run_holds_no_text_and_replays_equal(tmp_path: Path, where: list[str]) -> None:
    record = tmp_path / "run.jsonl"
    command = [sys.executable, "-m", "furnace", "serve", "--port", "0", "--engine", "mock:echo", *where]
    with subprocess.Popen([*command, "--record", str(record)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="unused") as client:
            for _ in range(3):
                answer = client.chat.completions.create(
                    model="echo", messages=[{"role": "user", "content": SECRET}], temperature=0
                )
                assert answer.choices[0].message.content == SECRET
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0

    written = record.read_text()
    assert SECRET not in written
    assert str([ord(char) for char in SECRET[:4]])[1:-1].replace(" ", "") not in written
    replayed = furnace("replay", str(record))
    assert replayed.returncode == 0, replayed.stderr
    assert "3 sequences" in replayed.stdout
    assert "every step is as it was" in replayed.stdout

    lines = written.splitlines()
    planned = next(number for number, line in enumerate(lines) if "chunks" in json.loads(line))
    changed = json.loads(lines[planned])
    changed["chunks"] = []
    lines[planned] = json.dumps(changed)
    record.write_text("\n".join(lines) + "\n")
    differs = furnace("replay", str(record))
    assert differs.returncode == 1
    assert f"line {planned + 1} of the record" in differs.stdout


def test_a_file_that_is_no_record_is_told_in_one_line(tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("hello\n")
    refused = furnace("replay", str(other))
    assert refused.returncode == 2
    assert refused.stderr.startswith("furnace: this is no record")
    assert len(refused.stderr.splitlines()) == 1


def test_an_engine_with_a_scheduler_of_its_own_has_nothing_to_record(tmp_path: Path) -> None:
    refused = furnace("serve", "--port", "0", "--engine", "mock:echo?level=engine", "--record", str(tmp_path / "run"))
    assert refused.returncode == 2
    assert "nothing to record" in refused.stderr
