"""Runs the kit without pytest, for ``furnace check``."""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Generator
from typing import Any

import msgspec

from furnace.contracts import Capabilities, Limits, LlmEngine, StepCapabilities
from furnace.plugins.errors import describe
from furnace.runtime import Scheduled
from furnace.testing.conformance import Conformance
from furnace.testing.engines import EngineConformance
from furnace.testing.verdict import ConformanceError, Inapplicable

__all__ = ["Check", "EngineFacts", "Outcome", "Result", "Run", "all_checks"]

# Where it fails, so do most others, and its message is the one that says why.
_FIRST = "test_logits_are_finite_float32_rows_of_the_vocabulary"
_HUNG_SECONDS = 20.0
"""So long a check waits for what never comes, if it does not hang altogether."""
_MOST_HUNG = 3


class Outcome(enum.StrEnum):
    """What came of a check."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"


class Check(msgspec.Struct, frozen=True):
    """A check of the kit.

    Attributes:
        name: of its method.
        group: what its class is about.
        says: what it looks at, in one line.
    """

    name: str
    group: str
    says: str

    @property
    def title(self) -> str:
        """Its name as a sentence."""
        return self.name.removeprefix("test_").replace("_", " ")


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """What came of a check.

    Attributes:
        message: why it failed and what to do, or why it was skipped.
        seconds: that it took.
    """

    check: Check
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0


class EngineFacts(msgspec.Struct, frozen=True):
    """What an engine says of itself.

    Attributes:
        max_context: as checked, with the kit's bound on it.
        limits: of the model, where furnace schedules it.
        step: what the model declares, where furnace schedules it.
    """

    name: str
    max_context: int
    capabilities: Capabilities
    limits: Limits | None = None
    step: StepCapabilities | None = None


def all_checks(kit: type[Conformance] = EngineConformance) -> list[Check]:
    """Every check of a class of the kit, those of the engine first."""
    checks: dict[str, Check] = {}
    for group in kit.__mro__:
        for name, value in vars(group).items():
            if name.startswith("test_") and name not in checks:
                checks[name] = Check(name, _first_line(group), _first_line(value))
    return list(checks.values())


class Run:
    """One run of the kit.

    Args:
        spec: of the engine.
        pick: part of the names of the checks to run; empty for all.
        tolerance: in place of ``Conformance.tolerance``.

    Attributes:
        facts: about the engine.
        tolerance: as given.

    Raises:
        PluginError: there is no such engine, or it can't be loaded.
    """

    def __init__(self, spec: str, pick: str = "", tolerance: float | None = None) -> None:
        self.tolerance = tolerance
        settings: dict[str, object] = {"spec": spec, "loaded": []}
        if tolerance is not None:
            # The reference's logits are further away: theirs are the unrounded ones.
            golden = max(EngineConformance.golden_tolerance, 2 * tolerance)
            settings |= {"tolerance": tolerance, "golden_tolerance": golden}
        kit: type[_Checked] = type("Checked", (_Checked,), settings)
        self._kit = kit()
        checks = [check for check in all_checks() if pick in check.name or pick in check.title]
        self._checks = sorted(checks, key=lambda check: check.name != _FIRST)
        first = self._kit.make_engine()
        self.facts = _facts(first)
        kit.loaded.append(first)

    def __len__(self) -> int:
        return len(self._checks)

    def results(self) -> Generator[Result | Check]:
        """Each check before it runs, and then its result."""
        self._kit.setup_class()
        hung = 0
        try:
            for check in self._checks:
                yield check
                if hung >= _MOST_HUNG:
                    yield Result(check, Outcome.SKIPPED, f"{hung} checks in a row hung before it; mend those first")
                    continue
                result = self._result(check)
                hung = hung + 1 if result.outcome is Outcome.FAILED and result.seconds >= _HUNG_SECONDS else 0
                yield result
        finally:
            # That an engine can't be closed is what a check says; here it would only hide the others.
            with contextlib.suppress(Exception):
                self._kit.teardown_class()

    def _result(self, check: Check) -> Result:
        began = time.monotonic()
        outcome, message = Outcome.OK, ""
        try:
            getattr(self._kit, check.name)()
        except Inapplicable as reason:
            outcome, message = Outcome.SKIPPED, str(reason)
        except ConformanceError as error:
            outcome, message = Outcome.FAILED, str(error)
        except Exception as error:
            outcome, message = Outcome.FAILED, f"it ended with {type(error).__name__}: {describe(error)}"
        return Result(check, outcome, message, round(time.monotonic() - began, 3))


class _Checked(EngineConformance):
    """Begins with the engine that was loaded to see whether there is one."""

    loaded: list[LlmEngine] = []  # noqa: RUF012 - each run has its own

    def make_engine(self) -> LlmEngine:
        return self.loaded.pop() if self.loaded else super().make_engine()


def _facts(engine: LlmEngine) -> EngineFacts:
    limits = step = None
    if isinstance(engine, Scheduled):
        limits, step = engine.model.limits, engine.model.capabilities
    return EngineFacts(engine.name, engine.max_context, engine.capabilities, limits, step)


def _first_line(value: Any) -> str:
    return (value.__doc__ or "").strip().partition("\n")[0].replace("``", "")
