"""What all classes of checks have in common: what is tested, and how a check runs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, TypeVar

from furnace.checkpoint import open_checkpoint
from furnace.contracts import BatchStepModel, ChatInput, EngineBusyError, EngineContext, LlmEngine, Message, StepModel
from furnace.plugins import load_engine
from furnace.plugins.cores import usable_cores
from furnace.plugins.engine_loader import default_context
from furnace.runtime import Scheduled
from furnace.runtime.plain_model import PlainModel
from furnace.scheduler import SchedulerConfig
from furnace.testing.engine.client import Client
from furnace.testing.host import EngineHost, ModelHost
from furnace.testing.seed import VARIABLE, current_seed, generator
from furnace.testing.step.driver import Steps
from furnace.testing.step.spy import Spy
from furnace.testing.verdict import ConformanceError, Inapplicable
from furnace.text import TextPipeline

__all__ = ["Conformance", "engine_check", "served_check", "step_check"]

MAX_CONTEXT = 512
"""Prompt and output of the engine under test: short, so that checks at its edge are cheap."""
KV_TOKENS = 1024
"""KV cache of the engine under test: small, so that it can be filled to the brim."""
EXAMPLE = "Once upon a time there was a little dog. One day the dog saw a big red ball in the park, and it was happy."

SelfT = TypeVar("SelfT", bound="Conformance")


class Conformance:
    """What is tested. Subclasses say it with ``spec``, or by overriding ``make_engine`` or ``make_model``.

    Attributes:
        spec: an engine spec, such as ``acme:demo``.
        options: of the engine, as after ``-o``.
        patience: seconds that one check may take; a check that takes longer hangs.
        tolerance: how far logits that should be equal may be apart, relative to the largest of them. Where the model
            declares ``deterministic`` nothing is tolerated.
        golden_tolerance: for tiny-lm alone, how far its logits may be from the reference's, relative to the largest of
            them. The default has room for lower precision; an engine that computes in float32 sets 1e-3.
    """

    spec: ClassVar[str | None] = None
    options: ClassVar[Mapping[str, object]] = {}
    patience: ClassVar[float] = 120.0
    tolerance: ClassVar[float] = 1e-3
    golden_tolerance: ClassVar[float] = 2e-2
    _pipeline: ClassVar[TextPipeline | None] = None
    _engine_host: ClassVar[EngineHost | None] = None
    _served_host: ClassVar[EngineHost | None] = None
    _model_host: ClassVar[ModelHost | None] = None

    def make_context(self) -> EngineContext:
        """What the operator of the engine under test decided: a short context and a small KV cache."""
        return EngineContext(
            threads=min(2, usable_cores()),
            max_context=MAX_CONTEXT,
            kv_tokens=KV_TOKENS,
            memory_bytes=default_context().memory_bytes,
        )

    def make_engine(self) -> LlmEngine:
        """A new engine, not started. Called in a worker thread."""
        if self.spec is None:
            raise TypeError(f"{type(self).__name__} needs a spec, such as spec = 'acme:demo', or make_engine()")
        context = self.make_context()
        bounds = SchedulerConfig(max_context=context.max_context)
        return load_engine(self.spec, context=context, options=self.options, scheduler=bounds)

    def make_model(self) -> StepModel | BatchStepModel:
        """A new step model: by default the one below the engine. Called in a worker thread.

        Raises:
            Inapplicable: the engine has a scheduler of its own.
        """
        engine = self.make_engine()
        if not isinstance(engine, Scheduled):
            raise Inapplicable("the engine has a scheduler of its own: there is no step model to look at")
        type(self)._pipeline = engine.pipeline
        return engine.model

    def example_tokens(self, model: BatchStepModel) -> list[int]:
        """Tokens such as clients send: a chat, and the beginning of an answer. Random ones without a text side."""
        if self._pipeline is None:
            draw = generator("example")
            return [draw.randrange(model.vocab_size) for _ in range(200)]
        tokens = self._pipeline.encode_text(" ".join([EXAMPLE] * 4))
        if self._pipeline.has_chat_template:
            tokens = self._pipeline.encode_chat(ChatInput([Message("user", "Tell me a story.")])) + tokens
        return tokens

    def make_pipeline(self) -> TextPipeline:
        """The text side with which a model without engine is served: by default that of tiny-lm."""
        if self._pipeline is not None:
            return self._pipeline
        with open_checkpoint("tiny-lm") as checkpoint:
            return TextPipeline.from_checkpoint(checkpoint)

    def served_model(self) -> Scheduled:
        """A new step model behind furnace's scheduler, with a spy between them."""
        model = self.batch_model()
        return Scheduled(Spy(model), self.make_pipeline(), SchedulerConfig(max_context=MAX_CONTEXT))

    def batch_model(self) -> BatchStepModel:
        """A new step model in the form that the scheduler knows."""
        model = self.make_model()
        return model if isinstance(model, BatchStepModel) else PlainModel(model)

    @classmethod
    def setup_class(cls) -> None:
        """Forget what a base class may have loaded; nothing is loaded before a check needs it."""
        cls._engine_host = cls._served_host = cls._model_host = cls._pipeline = None

    @classmethod
    def teardown_class(cls) -> None:
        """Close what was loaded."""
        engines, model, pipeline = (cls._engine_host, cls._served_host), cls._model_host, cls._pipeline
        cls.setup_class()
        if pipeline is not None:
            pipeline.close()
        for engine in engines:
            if engine is not None:
                engine.close()
        if model is not None:
            model.close()

    def _run_engine_check(self, check: Callable[[LlmEngine], Coroutine[Any, Any, None]], what: str) -> None:
        __tracebackhide__ = True
        if self._engine_host is None:
            type(self)._engine_host = EngineHost(self.make_engine, self.patience)
        assert self._engine_host is not None  # noqa: S101 - for the type checker
        self._engine_host.run(check, what)

    def _run_served_check(self, check: Callable[[LlmEngine], Coroutine[Any, Any, None]], what: str) -> None:
        __tracebackhide__ = True
        if self._served_host is None:
            type(self)._served_host = EngineHost(self.served_model, self.patience)
        assert self._served_host is not None  # noqa: S101 - for the type checker
        self._served_host.run(check, what)

    def _run_step_check(self, check: Callable[[BatchStepModel], None], what: str) -> None:
        __tracebackhide__ = True
        if self._model_host is None:
            type(self)._model_host = ModelHost(self.batch_model, self.patience)
        assert self._model_host is not None  # noqa: S101 - for the type checker
        self._model_host.run(check, what)


def engine_check(body: Callable[[SelfT, Client], Coroutine[Any, Any, None]]) -> Callable[[SelfT], None]:
    """Make a check of a method that asks a running engine, on whose loop it runs."""

    @functools.wraps(body)
    def check(self: SelfT) -> None:
        __tracebackhide__ = True
        try:
            self._run_engine_check(lambda engine: _asked(body, self, Client(engine)), f"The check {body.__name__}")
        except ConformanceError as error:
            raise _replayable(error) from error.__cause__

    del check.__wrapped__  # pytest would take its parameters for fixtures
    return check


async def _asked(body: Callable[[SelfT, Client], Coroutine[Any, Any, None]], kit: SelfT, client: Client) -> None:
    """Run a check that may send more requests at once than the engine's queue takes.

    Raises:
        Inapplicable: it did, and the queue, which may be short, takes requests again.
    """
    try:
        await body(kit, client)
    except EngineBusyError as error:
        said = error.message
    else:
        return
    gc.collect()  # what the check had open
    for generation in await client.fill([client.ask(max_tokens=1)], "a check sent several requests at once"):
        await client.read(generation)
    raise Inapplicable(f"the check sends more requests at once than the queue takes: {said}")


def served_check(body: Callable[[SelfT, Client], Coroutine[Any, Any, None]]) -> Callable[[SelfT], None]:
    """Make a check of a method that asks furnace's scheduler with the model behind it, on whose loop it runs."""

    @functools.wraps(body)
    def check(self: SelfT) -> None:
        __tracebackhide__ = True
        try:
            self._run_served_check(lambda engine: body(self, Client(engine)), f"The check {body.__name__}")
        except ConformanceError as error:
            raise _replayable(error) from error.__cause__

    del check.__wrapped__  # as above
    return check


def step_check(body: Callable[[SelfT, Steps], None]) -> Callable[[SelfT], None]:
    """Make a check of a method that drives a model, on the model's thread; what it leaves open is released."""

    @functools.wraps(body)
    def check(self: SelfT) -> None:
        __tracebackhide__ = True

        def run(model: BatchStepModel) -> None:
            steps = Steps(model, self.tolerance)
            try:
                body(self, steps)
            except Inapplicable:
                steps.release_all()
                raise
            steps.release_all()

        try:
            self._run_step_check(run, f"The check {body.__name__}")
        except ConformanceError as error:
            raise _replayable(error) from error.__cause__

    del check.__wrapped__  # as above
    return check


def _replayable(error: ConformanceError) -> ConformanceError:
    """A failure that says with which seed it comes again, and not where in the kit it was found."""
    error.add_note(f"The seed was {current_seed()}: {VARIABLE}={current_seed()}, or --furnace-seed={current_seed()}.")
    return error.with_traceback(None)
