"""Puts a mock together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from furnace import Scheduled, SchedulerConfig, TextPipeline
from furnace.contracts import EngineContext, InvalidRequestError, LlmEngine
from furnace_mock.batch_model import MockModel
from furnace_mock.behaviour import Behaviour
from furnace_mock.engine import MockEngine
from furnace_mock.options import Form, Level, MockOptions
from furnace_mock.pipeline import load_pipeline
from furnace_mock.plain_model import PlainMockModel
from furnace_mock.replies import MODELS
from furnace_mock.step_gate import StepGate

__all__ = ["Mock", "build_mock"]


@dataclass(frozen=True)
class Mock:
    """An engine with what tests ask it. ``async with`` starts and closes the engine.

    Attributes:
        engine: to serve; starts nothing before ``start()``.
        model: the step model behind it, or None on level ``engine``.
        pipeline: its text side.
        gate: in front of each step, if one was asked for.
    """

    engine: LlmEngine
    model: MockModel | PlainMockModel | None
    pipeline: TextPipeline
    gate: StepGate | None = None

    @property
    def held(self) -> int:
        """How many sequences the model holds; on level ``engine`` how many requests the engine does, waiting ones too.

        From any thread.
        """
        if isinstance(self.engine, MockEngine):
            return self.engine.held
        return 0 if self.model is None else self.model.held

    @property
    def violations(self) -> list[str]:
        """What the model saw that its contract forbids; empty when all is well."""
        return [] if self.model is None else self.model.behaviour.contract.violations

    def resume(self) -> None:
        """Open the gate and end a model's hanging, for good. From any thread."""
        if self.gate is not None:
            self.gate.open()
        if self.model is not None:
            self.model.behaviour.faults.resume()

    async def __aenter__(self) -> Self:
        await self.engine.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        # A model that hangs could not end.
        self.resume()
        await self.engine.aclose()


def build_mock(
    model: str,
    options: MockOptions | None = None,
    context: EngineContext | None = None,
    *,
    gate: StepGate | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> Mock:
    """Make a mock.

    Args:
        model: ``echo``, ``lorem``, ``script`` or ``recurrent``.
        options: see ``MockOptions``.
        context: its ``max_context``, ``kv_tokens`` and ``chat_template`` go before the options.
        gate: in front of each step of a step model.
        sleep: takes the delays' seconds, in the model thread. Level ``engine`` sleeps on the event loop instead.

    Raises:
        InvalidRequestError: there is no such model, an option does not go with it, or the limits contradict each
            other.
    """
    options = _with_context(options or MockOptions(), context)
    if model not in MODELS:
        raise InvalidRequestError(f"there is no mock {model!r}; there are {', '.join(MODELS)}")
    script = _script(model, options)
    pipeline, ids = load_pipeline(script, chat_template=None if context is None else context.chat_template)
    if options.level == Level.ENGINE:
        if gate is not None:
            raise InvalidRequestError("a gate needs a step model; this is level=engine")
        return Mock(MockEngine(model, options, pipeline, script=ids, sleep=asyncio.sleep), None, pipeline)
    behaviour = Behaviour(model, options, vocab_size=pipeline.vocab_size, script=ids, gate=gate, sleep=sleep)
    step_model = PlainMockModel(behaviour) if options.form == Form.PLAIN else MockModel(behaviour)
    engine = Scheduled(step_model, pipeline, SchedulerConfig(max_queue=options.max_queue))
    return Mock(engine, step_model, pipeline, gate)


def _with_context(options: MockOptions, context: EngineContext | None) -> MockOptions:
    if context is None:
        return options
    return msgspec.structs.replace(
        options,
        max_context=options.max_context if context.max_context is None else context.max_context,
        kv_tokens=options.kv_tokens if context.kv_tokens is None else context.kv_tokens,
    )


def _script(model: str, options: MockOptions) -> Sequence[bytes]:
    try:
        script = options.script
    except ValueError:
        raise InvalidRequestError(f"hex={options.hex} is not hexadecimal", param="hex") from None
    if (script is None) == (model == "script"):
        need = "mock:script needs" if script is None else "only mock:script takes"
        raise InvalidRequestError(f"{need} its output as text=A|B|C or hex=E4BD|A0")
    return script or ()
