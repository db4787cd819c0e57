"""Engines beside each other on the same model file: ``nox -s bench -- engines``.

All contenders are loaded at the beginning and stay so. Each load is put on one after the other, in the order A B C,
then C B A, so that a machine that becomes slower or faster favours nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.engines_load import LOADS, Driver, EngineLoad, HttpServer, Side
from benchmarks.engines_plot import draw
from benchmarks.engines_report import sheets, write_tables
from benchmarks.engines_result import Cell, EngineInfo, Result
from benchmarks.rivals import CONTENDERS, Contender, Environment, MissingError, Setting, environment_of
from furnace.bench.errors import BenchError
from furnace.bench.load import Measured
from furnace.bench.prompts import PromptScale
from furnace.bench.report import this_machine
from furnace.bench.summary import Summary, summarise
from furnace.plugins.cores import usable_cores

__all__ = ["main"]

ROOT = Path(__file__).resolve().parent.parent
IDLE_SECONDS = 5.0
# A contender that takes more than this share of a core while another is measured would slow that one down.
MOST_IDLE = 0.05


class Comparison:
    """The contenders that are loaded, and what was found so far.

    Args:
        options: from the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.result = Result(
            started_at=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=this_machine(),
            model=options.model.name,
            threads=options.threads,
            seed=options.seed,
            loads=[load.title for load in options.loads],
        )
        self._options = options
        # By contender, then by the title of a setting.
        self._sides: dict[str, dict[str, Side]] = {}
        self._scale = PromptScale()

    async def run(self) -> None:
        """Load everybody, measure, and end everybody."""
        try:
            await self._run()
        finally:
            for sides in self._sides.values():
                for side in sides.values():
                    side.stop()

    async def _run(self) -> None:
        for contender in self._options.only:
            try:
                await self._load(contender)
            except (MissingError, RuntimeError, BenchError) as error:
                self.result.missing[contender.name] = str(error)
                print(f"without {contender.name}: {error}", flush=True)
        await self._look_at_idle()
        for load in self._options.loads:
            await self._measure(load)
        for engine in self.result.engines:
            sides = self._sides.get(engine.name, {}).values()
            engine.resident = max((side.cost().resident for side in sides), default=0)

    async def _load(self, contender: Contender) -> None:
        environment = environment_of(contender, self._options.rivals)
        sides = self._sides.setdefault(contender.name, {})
        try:
            for setting in contender.settings:
                begun = time.perf_counter()
                sides[setting.title] = side = self._start(setting, environment)
                if isinstance(side, HttpServer):
                    scale = await side.scale()
                    if self._scale == PromptScale():
                        self._scale = scale  # all get the same text: the first tokenizer says how long it is
                print(f"{contender.name}, {setting.title}: ready in {time.perf_counter() - begun:.1f} s", flush=True)
        except BaseException:
            for side in self._sides.pop(contender.name).values():
                side.stop()
            raise
        self.result.engines.append(
            EngineInfo(
                name=contender.name,
                ours=contender.is_furnace,
                version=environment.version,
                weights=contender.weights,
            )
        )

    def _start(self, setting: Setting, environment: Environment) -> Side:
        values = {
            "{python}": str(environment.python),
            "{bin}": str(environment.python.parent),
            "{packages}": str(environment.packages),
            "{gguf}": str(self._options.model),
            "{threads}": str(self._options.threads),
        }
        if "{checkpoint}" in setting.command:
            values["{checkpoint}"] = str(self._checkpoint())
        if "{right_weights}" in setting.command:
            values["{right_weights}"] = str(self._right_weights(environment.python))

        def filled(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        command = [filled(part) for part in setting.command]
        variables = {name: filled(value) for name, value in setting.environment.items()}
        if setting.ready is None:
            return Driver(command, variables, ROOT)
        return HttpServer(command, setting.ready, variables, ROOT)

    def _checkpoint(self) -> Path:
        """The model file's weights as a directory; made by transformers, once."""
        directory: Path = self._options.rivals / f"checkpoint-{self._options.model.stem}"
        if not (directory / "tokenizer.json").exists():
            converter = next(contender for contender in CONTENDERS if contender.name == "transformers")
            python = environment_of(converter, self._options.rivals).python
            command = [str(python), "-m", "benchmarks.rivals_convert", str(self._options.model), str(directory)]
            subprocess.run(command, check=True, cwd=ROOT)
        return directory

    def _right_weights(self, python: Path) -> Path:
        directory: Path = self._options.rivals / f"genai-{self._options.model.stem}"
        if not (directory / "openvino_model.xml").exists():
            try:
                from benchmarks.rivals_genai_weights import write_right_weights
            except ImportError as error:
                raise MissingError(
                    f"openvino-genai needs openvino beside furnace to get its weights: {error}"
                ) from None
            try:
                write_right_weights(self._options.model, directory, python)
            except (ValueError, OSError, subprocess.CalledProcessError) as error:
                raise MissingError(f"openvino-genai's graph can't get the right weights: {error}") from error
        return directory

    async def _look_at_idle(self) -> None:
        sides = [(name, title, side) for name, by_title in self._sides.items() for title, side in by_title.items()]
        await asyncio.sleep(1)
        before = [side.cost().cpu for _, _, side in sides]
        await asyncio.sleep(IDLE_SECONDS)
        for (name, title, side), cpu in zip(sides, before, strict=True):
            share = (side.cost().cpu - cpu) / IDLE_SECONDS
            engine = next(engine for engine in self.result.engines if engine.name == name)
            engine.idle_cpu = max(engine.idle_cpu, share)
            if share > MOST_IDLE:
                self._problem(f"{name}, {title}: takes {share:.0%} of a core while nobody asks")

    async def _measure(self, load: EngineLoad) -> None:
        taking_part: dict[str, Side] = {}
        for name, sides in self._sides.items():
            # The trial chooses between settings, and warms up.
            trials = {title: await self._burst(load, "trial", name, side) for title, side in sides.items()}
            best = max(trials, key=lambda title: _merit(load, trials[title]))
            rates = {title: summary.output_rate for title, summary in trials.items()} if len(trials) > 1 else {}
            self.result.cells.append(Cell(load=load.title, engine=name, setting=best, trials=rates, rounds=[]))
            taking_part[name] = sides[best]
        for round_ in range(self._options.rounds):
            prompt_tokens = {}
            for name in taking_part if round_ % 2 == 0 else reversed(taking_part):
                summary = await self._burst(load, f"round {round_ + 1}", name, taking_part[name])
                prompt_tokens[name] = summary.prompt_tokens
                cell = self.result.cell(load.title, name)
                if cell is not None:
                    cell.rounds.append(summary)
            if len(set(prompt_tokens.values())) > 1:
                self._problem(f"{load.title}, round {round_ + 1}: the prompts had different lengths: {prompt_tokens}")

    async def _burst(self, load: EngineLoad, part: str, name: str, side: Side) -> Summary:
        prompts = load.prompts(self._scale, self._options.seed)
        requests = [prompts.request(f"{load.title}/{part}", index) for index in range(load.requests)]
        measured = await side.burst(load, requests)
        summary = summarise([measured])
        for problem in _problems(load, measured):
            self._problem(f"{name}, {load.title}, {part}: {problem}")
        ttft = summary.ttft.p50 if summary.ttft else float("nan")
        print(f"{load.title}, {part}: {name} {summary.output_rate:.1f} tok/s, TTFT {ttft * 1000:.0f} ms", flush=True)
        return summary

    def _problem(self, text: str) -> None:
        self.result.problems.append(text)
        print(f"problem: {text}", flush=True)


def _merit(load: EngineLoad, summary: Summary) -> float:
    """A long prompt alone is for the time to its first token, everything else for the rate."""
    if load.prompt >= 1000 and summary.ttft is not None:
        return -summary.ttft.p50
    return summary.output_rate


def _problems(load: EngineLoad, measured: Measured) -> list[str]:
    found = []
    for sample in measured.samples:
        if sample.failure is not None:
            found.append(f"{sample.failure}: {sample.message}")
        elif sample.completion_tokens != load.output:
            found.append(f"{sample.completion_tokens} tokens of output instead of {load.output}")
        elif abs(sample.prompt_tokens - load.prompt) > load.prompt / 10:
            found.append(f"a prompt of {sample.prompt_tokens} tokens instead of {load.prompt}")
    return found[:3]


def main(arguments: list[str]) -> None:
    """Measure, or read an earlier result, and write what was asked for."""
    options = _parse(arguments)
    if options.read is not None:
        result = msgspec.json.decode(options.read.read_bytes(), type=Result)
    else:
        comparison = Comparison(options)
        # Servers have a session of their own, so that they would outlive a benchmark that is simply ended.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            asyncio.run(comparison.run())
        except KeyboardInterrupt:
            comparison.result.problems.append("stopped early")
        result = comparison.result
    console = Console(highlight=False)
    for sheet in sheets(result):
        console.print(sheet.rich())
    if options.json is not None:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    if options.plot is not None and any(cell.rounds for cell in result.cells):
        draw(result, options.plot)
    if options.markdown is not None:
        write_tables(result, options.markdown)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("nox -s bench -- engines", description=__doc__.partition("\n")[0])
    names = {contender.name: contender for contender in CONTENDERS}
    by_clients = {load.title.split()[0]: load for load in LOADS}
    parser.add_argument("--model", type=Path, default=os.environ.get("FURNACE_SMOLLM2"), help="GGUF file")
    parser.add_argument("--rivals", type=Path, default=ROOT / ".nox/rivals", help="folder of the rivals' environments")
    parser.add_argument("--only", help=f"contenders, of {','.join(names)}")
    parser.add_argument("--loads", help=f"of {' '.join(by_clients)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    parser.add_argument("--read", type=Path, help="a JSON of an earlier run, instead of measuring")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--markdown", type=Path, help="page whose tables are replaced")
    options = parser.parse_args(arguments)
    try:
        options.only = [names[name] for name in options.only.split(",")] if options.only else list(CONTENDERS)
        options.loads = [by_clients[word] for word in options.loads.split()] if options.loads else list(LOADS)
    except KeyError as error:
        parser.error(f"there is no {error}")
    if options.read is None and options.model is None:
        parser.error("--model FILE.gguf, or the environment variable FURNACE_SMOLLM2, is needed")
    return options
