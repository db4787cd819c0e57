"""Puts a diagnosis together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution, requires

from furnace.diagnosis.faster import faster_engine
from furnace.diagnosis.frameworks import DEVICES
from furnace.diagnosis.machine import look_at_machine
from furnace.diagnosis.model_place import find_model
from furnace.diagnosis.probe import probe
from furnace.diagnosis.report import Checked, Finding, Level, Machine, PluginReport, Report
from furnace.diagnosis.task import Task
from furnace.plugins.engine_spec import EngineSpec
from furnace.plugins.errors import PluginError
from furnace.plugins.hookspecs import ENGINE_GROUP, PLUGIN_GROUP
from furnace.plugins.installed import installed_plugins
from furnace.plugins.registry import find_engine, installed_engines

__all__ = ["diagnose"]

# An import that takes longer holds up everybody who mistypes an option.
_SLOW_IMPORT = 2.0


def diagnose(asked: Sequence[str], *, everything: bool = False, load: bool = False, seconds: float = 10.0) -> Report:
    """Look at the machine and at what is installed, and import what was asked for in processes of its own.

    Args:
        asked: specs (``torch:tiny-lm?dtype=float32``) and schemes (``torch``).
        everything: import all that is installed.
        load: load the models of the specs too.
        seconds: that each import may take.

    Raises:
        EngineSpecError: a spec can't be read.
    """
    specs = [(text, EngineSpec.parse(text) if ":" in text else None) for text in asked]
    installed = _installed()
    check = _Check(look_at_machine(), {each.name for each in installed if each.group == ENGINE_GROUP}, load, seconds)
    reports = [check.engine(text if spec is None else spec.scheme, spec) for text, spec in specs]
    if everything:
        rest = dict.fromkeys((each.group, each.name) for each in installed)
        for report in reports:
            rest.pop((report.group, report.name), None)
        reports += [
            check.engine(name) if group == ENGINE_GROUP else check.plugin(each)
            for (group, name) in rest
            for each in installed
            if (each.group, each.name) == (group, name)
        ]
    return Report(check.machine, installed, reports)


class _Check:
    """Imports what is asked for."""

    def __init__(self, machine: Machine, schemes: set[str], load: bool, seconds: float) -> None:
        self.machine = machine
        self._schemes = schemes
        self._load = load
        self._seconds = seconds

    def engine(self, scheme: str, spec: EngineSpec | None = None) -> PluginReport:
        """The engine of a scheme, and what a spec says of it."""
        report = PluginReport(group=ENGINE_GROUP, name=scheme, spec=None if spec is None else str(spec))
        try:
            engine = find_engine(scheme)
        except PluginError as error:
            report.findings.append(Finding(Level.ERROR, str(error)))
            return report
        report.distribution, report.version = engine.distribution, engine.version
        report.findings += _missing_requirements(engine.distribution)
        if spec is not None:
            report.model, there = find_model(spec)
            if there is False:
                report.findings.append(Finding(Level.ERROR, report.model))
        required = {name.lower() for name in _requirements(engine.distribution)}
        task = Task(
            group=ENGINE_GROUP,
            name=scheme,
            spec=report.spec,
            frameworks=[] if report.findings else sorted(required & DEVICES.keys()),
            load=self._load and not report.findings,
        )
        checked = self._import(report, task)
        model = "MODEL" if spec is None else spec.model
        advice = faster_engine(scheme, self.machine, checked.devices, self._schemes, model)
        if advice is not None:
            report.findings.append(Finding(Level.HINT, advice))
        return report

    def plugin(self, installed: PluginReport) -> PluginReport:
        """A plugin of the HTTP process."""
        report = PluginReport(
            group=PLUGIN_GROUP, name=installed.name, distribution=installed.distribution, version=installed.version
        )
        self._import(report, Task(group=PLUGIN_GROUP, name=installed.name))
        return report

    def _import(self, report: PluginReport, task: Task) -> Checked:
        report.checked = checked = probe(task, seconds=self._seconds)
        if checked.problem is not None:
            text = checked.problem
            if checked.stage in ("start", "import") and "pip " not in text:
                text += f"; pip install --upgrade {report.distribution}, or pip uninstall {report.distribution}"
            report.findings.append(Finding(Level.ERROR, text))
        if checked.frameworks:
            names = " and ".join(checked.frameworks)
            text = f"importing it imports {names}, which every mistyped option waits for: that belongs in create()"
            report.findings.append(Finding(Level.WARNING, text))
        elif checked.seconds is not None and checked.seconds > _SLOW_IMPORT:
            text = f"importing it took {checked.seconds:.1f} s: what takes long belongs in create()"
            report.findings.append(Finding(Level.WARNING, text))
        return checked


def _installed() -> list[PluginReport]:
    engines = installed_engines()
    reports = [
        PluginReport(group=ENGINE_GROUP, name=engine.scheme, distribution=engine.distribution, version=engine.version)
        for engine in engines
    ]
    for report in reports:
        others = [each.distribution for each in reports if each.name == report.name and each is not report]
        if others:
            text = f"{' and '.join(others)} brings the same scheme, so none can be used: pip uninstall one of them"
            report.findings.append(Finding(Level.ERROR, text))
        report.findings += _missing_requirements(report.distribution)
    reports += [
        PluginReport(group=PLUGIN_GROUP, name=plugin.name, distribution=plugin.distribution, version=plugin.version)
        for plugin in installed_plugins()
    ]
    return reports


def _missing_requirements(name: str) -> list[Finding]:
    """What a distribution requires everywhere and does not have; versions are pip's concern (``pip check``)."""
    findings = []
    for required in _requirements(name):
        try:
            distribution(required)
        except PackageNotFoundError:
            text = f"{name} requires {required}, which is not installed: pip install {required}"
            findings.append(Finding(Level.ERROR, text))
        except Exception:  # noqa: S112 # damaged metadata of some other package, which pip check reports
            continue
    return findings


def _requirements(name: str) -> list[str]:
    try:
        lines = requires(name) or []
    except Exception:
        return []  # not installed under that name, or damaged metadata
    # A line with a marker holds for some systems or for an extra only.
    plain = [re.match(r"[A-Za-z0-9][\w.-]*", line) for line in lines if ";" not in line]
    return [found[0] for found in plain if found]
