"""Nothing that an installed plugin does hurts who did not ask for it, and doctor survives all of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import pytest

GOOD = """
import furnace

class Factory(furnace.EngineFactory):
    def create(self, model, options, context):
        raise NotImplementedError

@furnace.hookimpl
def furnace_engine():
    return Factory()
"""
NEWER = GOOD.replace("    def create", "    api_version = 99\n    def create")
BROKEN = {
    "raises": "raise RuntimeError('no luck today')",
    "exits": "raise SystemExit('I am leaving')",
    "leaves": "import os; print('bye', flush=True); os._exit(7)",
    "vanishes": "import os; os._exit(3)",
    "crashes": "import faulthandler; faulthandler._sigsegv()",
    "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "lacks": "import no_such_module_at_all",
    "newer": NEWER,
    "hookless": "x = 1",
}
HANGS = "import threading\nthreading.Event().wait()\n" + GOOD
# Seconds in which a plugin comes to where it hangs, or to its end: on a machine that stalls the first may be too few.
SOON = ("2", "20")

EXPECTED = {
    "raises": r"can't be imported: no luck today; pip install --upgrade furnace-raises, or pip uninstall",
    "exits": r"can't be imported: SystemExit: I am leaving; pip install --upgrade furnace-exits",
    "leaves": r"ended the process while it was imported, with exit code 7; it last printed 'bye'; pip install",
    "vanishes": r"ended the process while it was imported, with exit code 3; pip install --upgrade furnace-vanishes",
    "crashes": r"crashed while it was imported, by SIGSEGV \(at .*furnace_crashes.py, line 1\); pip install",
    "killed": r"crashed while it was imported, by SIGKILL; pip install",
    "lacks": r"no module named 'no_such_module_at_all' \(.*pip install no_such_module_at_all\)",
    "newer": r"contracts version 99, but furnace .* speaks version .*: pip install --upgrade furnace-core",
    "hookless": r"has no furnace_engine hook: furnace_hookless needs a function furnace_engine\(\)",
}


def install(command: Any, name: str, code: str, requires: str = "") -> None:
    """Install ``furnace-NAME`` with the scheme NAME."""
    (command.site / f"furnace_{name}.py").write_text(code)
    command.install(f"furnace-{name}", scheme=name, target=f"furnace_{name}")
    if requires:
        metadata = command.site / f"furnace_{name}-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text() + f"Requires-Dist: {requires}\n")


@pytest.fixture
def broken(command: Any) -> Any:
    """The command among all plugins that can't be imported, and one whose import hangs."""
    for name, code in {**BROKEN, "hangs": HANGS}.items():
        install(command, name, code)
    info = command.site / "furnace_hooks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: furnace-hooks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[furnace.plugins]\nhooks = furnace_hooks\n")
    (command.site / "furnace_hooks.py").write_text("raise RuntimeError('this hook is broken')")
    return command


def errors_of(command: Any, *arguments: str) -> dict[str, str]:
    """The errors that doctor finds with what was asked for; it waits as long as any machine may need."""
    done = command("doctor", "--json", "--timeout", "100", *arguments)
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert done.returncode == any(f["level"] == "error" for each in report["asked"] for f in each["findings"])
    return {
        each["name"]: " ".join(f["text"] for f in each["findings"] if f["level"] == "error") for each in report["asked"]
    }


@pytest.mark.parametrize("arguments", [("--help",), ("engines",), ("doctor",), ("doctor", "--json"), ("doctor", "-h")])
def test_no_plugin_is_imported_that_was_not_asked_for(broken: Any, arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; from furnace.cli import main; code = main(sys.argv[1:]); "
        "print(code, *sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=broken.env, capture_output=True, text=True, timeout=240
    )
    status, *modules = done.stderr.split()

    assert status == "0"
    assert not [name for name in modules if name.startswith("furnace_") or name in {"acme_engine", "numpy", "torch"}]


@pytest.mark.parametrize("arguments", [("engines",), ("doctor",)])
def test_plugins_that_cannot_be_imported_are_listed_like_others(broken: Any, arguments: tuple[str, ...]) -> None:
    done = broken(*arguments)

    assert done.returncode == 0
    for name in (*BROKEN, "hangs", "acme"):
        assert re.search(rf"^{name} .*furnace-{name} ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", BROKEN)
def test_doctor_says_why_an_engine_cannot_be_imported_and_what_to_do(broken: Any, name: str) -> None:
    (text,) = errors_of(broken, name).values()

    assert re.search(EXPECTED[name], text)
    assert "\n" not in text


def place_of_hang(command: Any, name: str) -> str:
    """Where doctor says that an import hangs."""
    for seconds in SOON:
        text = errors_of(command, name, "--timeout", seconds)[name]
        assert f"hangs while it was imported: {seconds} s were not enough" in text
        if place := re.search(r"\(at (.*)\)", text):
            return place[1]
    pytest.fail(text)


def test_doctor_says_where_an_import_hangs(broken: Any) -> None:
    assert place_of_hang(broken, "hangs").endswith("furnace_hangs.py, line 2")


def test_an_import_that_hangs_in_native_code_and_keeps_the_gil_is_found_and_ended(command: Any) -> None:
    install(command, "stuck", "import ctypes\nctypes.PyDLL(None).sleep(3600)")

    assert place_of_hang(command, "stuck").endswith("furnace_stuck.py, line 2")


def test_what_a_plugin_starts_ends_with_the_check_and_is_not_waited_for(command: Any) -> None:
    file = command.site / "pid"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait()'])\n"
        f"pathlib.Path({str(file)!r}).write_text(str(child.pid))\n"
    )
    install(command, "parent", code + GOOD)

    assert errors_of(command, "parent") == {"parent": ""}
    wait_for_end(int(file.read_text()))


def test_what_a_plugin_forks_is_not_waited_for_and_may_print_without_end(command: Any) -> None:
    file = command.site / "pid"
    code = (
        "import os, pathlib\n"
        "if child := os.fork():\n"
        f"    pathlib.Path({str(file)!r}).write_text(str(child))\n"
        "while not child:\n"
        "    try:\n"
        "        os.write(1, b'x' * 1000)\n"
        "    except OSError:\n"
        "        pass\n"
    )
    install(command, "forks", code + GOOD)

    assert errors_of(command, "forks") == {"forks": ""}
    wait_for_end(int(file.read_text()))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing tells a process that its parent ended")
def test_an_import_that_hangs_ends_with_a_doctor_that_is_killed(command: Any) -> None:
    pipe = command.site / "pipe"
    os.mkfifo(pipe)
    install(command, "hanging", f"import threading\nfile = open({str(pipe)!r}, 'w')\nthreading.Event().wait()")
    doctor = command.start("doctor", "hanging", "--timeout", "3600")
    with pipe.open() as reader:
        doctor.kill()

        assert reader.read() == ""  # the end of the file comes with the end of who had it open


def wait_for_end(pid: int) -> None:
    """Wait for the end of a process that was killed; a zombie is left for whoever adopted it."""
    end = time.monotonic() + 60
    state = "?"
    while state and not state.startswith("Z"):
        assert time.monotonic() < end, "it still runs after a minute"
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()


def test_an_import_of_three_seconds_is_waited_for_and_remarked_on(command: Any) -> None:
    install(command, "slow", "import time\ntime.sleep(3)\n" + GOOD)
    done = command("doctor", "slow")

    assert done.returncode == 0
    assert re.search(r"importing it took [3-9]\.\d s: what takes long belongs in create\(\)", done.stdout)


def test_all_are_checked_and_none_hurts_the_others(broken: Any) -> None:
    for seconds in SOON:
        errors = errors_of(broken, "--all", "--timeout", seconds)
        if not errors["acme"] + errors["python"]:
            break

    # There may be more in the environment of the tests.
    assert errors.keys() >= {*BROKEN, "hangs", "acme", "python", "hooks"}
    assert not errors["acme"] + errors["python"]
    assert all(errors[name] for name in BROKEN)
    assert "hangs while it was imported" in errors["hangs"]
    assert "this hook is broken" in errors["hooks"]


def test_an_engine_that_works_is_described(command: Any) -> None:
    done = command("doctor", "acme:demo")

    assert done.returncode == 0
    assert re.search(r"^imported +api_version 1, in \d+\.\d+ s", done.stdout, re.MULTILINE)
    assert re.search(r'^options +name: str = "", size: int = 1', done.stdout, re.MULTILINE)
    assert re.search(r"^state +ok", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("acme:demo?sise=2", "unknown option 'sise', did you mean 'size'"),
        ("acme:demo?size=big", "option size is int, not 'big'"),
        ("acme:./nowhere.gguf", "there is no file or directory './nowhere.gguf'"),
        ("python:nowhere.py:engine", "there is no file or directory 'nowhere.py'"),
        ("nix:demo", "perhaps its package is named furnace-nix"),
        ("acne:demo", "did you mean 'acme'"),
    ],
)
def test_a_spec_that_cannot_be_served_is_told_with_its_fix(command: Any, spec: str, message: str) -> None:
    (text,) = errors_of(command, spec).values()

    assert message in text
    assert "pip install --upgrade" not in text


def test_a_spec_that_cannot_be_read_is_a_mistake_on_the_command_line(command: Any) -> None:
    done = command("doctor", "x:y")

    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


def test_the_model_is_loaded_when_that_is_asked_for(command: Any) -> None:
    done = command("doctor", "acme:demo", "--load")
    assert done.returncode == 0
    assert re.search(r"^loaded +demo, context of 64 tokens, in ", done.stdout, re.MULTILINE)

    assert "Missing" not in errors_of(command, "acme:demo")["acme"]
    assert "No such file or directory: missing.gguf" in errors_of(command, "acme:missing", "--load")["acme"]
    assert "no device" in errors_of(command, "acme:unstartable", "--load")["acme"]


def test_what_a_distribution_requires_and_lacks_is_told_from_metadata(command: Any) -> None:
    install(command, "needy", GOOD, requires="no-such-framework>=2")
    done = command("doctor")

    assert done.returncode == 0
    assert "needy: furnace-needy requires no-such-framework, which is not installed" in done.stdout
    assert "pip install no-such-framework" in errors_of(command, "needy")["needy"]


def test_devices_come_from_the_framework_that_the_distribution_requires(command: Any) -> None:
    install(command, "flame", GOOD, requires="torch")
    (command.site / "torch.py").write_text(
        "class cuda:\n"
        "    is_available = staticmethod(lambda: True)\n"
        "    device_count = staticmethod(lambda: 1)\n"
        "    get_device_name = staticmethod(lambda index: 'Some GPU')\n"
        "    get_device_properties = staticmethod(lambda index: type('P', (), {'total_memory': 24e9}))\n"
        "class backends:\n"
        "    class mps:\n"
        "        is_available = staticmethod(lambda: False)\n"
        "get_num_threads = lambda: 3\n"
    )
    info = command.site / "torch-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.0\n")
    report = json.loads(command("doctor", "--json", "flame", "acme").stdout)
    flame, acme = (each["checked"] for each in report["asked"])

    assert (flame["devices"], flame["threads"]) == (["cpu", "cuda:0 Some GPU, 24 GB"], 3)
    assert flame["frameworks"] == []
    assert acme["devices"] == []


def test_a_framework_that_is_imported_too_early_is_a_warning(command: Any) -> None:
    (command.site / "torch.py").write_text("")
    install(command, "eager", "import torch\n" + GOOD)
    done = command("doctor", "eager")

    assert done.returncode == 0
    assert "warning: importing it imports torch" in done.stdout


def test_what_a_plugin_prints_does_not_mix_with_the_report(command: Any) -> None:
    install(command, "loud", "print('x' * 1_000_000)\n" + GOOD)
    done = command("doctor", "loud", "--json")

    assert done.returncode == 0
    assert json.loads(done.stdout)["asked"][0]["checked"]["api_version"] == 1


def test_a_duplicate_scheme_is_an_error_for_who_asks_for_it(command: Any) -> None:
    command.install("acme-llm", scheme="acme", target="acme_llm", version="3")

    assert command("doctor").returncode == 0
    assert "pip uninstall" in errors_of(command, "acme")["acme"]
