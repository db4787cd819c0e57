"""What a diagnosis found."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Checked", "Finding", "Level", "Loaded", "Machine", "PluginReport", "Report"]


class Level(enum.StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """It can't be used."""
    WARNING = "warning"
    """It works, and not as it should."""
    HINT = "hint"
    """It could be better."""


class Finding(msgspec.Struct, frozen=True):
    """Something to know, with what to do about it, on one line."""

    level: Level
    text: str


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What engines have to compute with.

    Attributes:
        furnace: its version.
        python: version and implementation.
        platform: operating system and its version.
        architecture: of the processor, such as ``x86_64``.
        cpu: the processor's name; empty if nobody knows.
        features: instruction sets of it that engines use.
        cores: how many this process may use.
        cores_total: how many there are.
        memory: bytes that this process may use, or None if nobody knows.
        gpus: names of NVIDIA's; found without a driver library, so no promise that an engine can use them.
    """

    furnace: str
    python: str
    platform: str
    architecture: str
    cpu: str
    features: list[str]
    cores: int
    cores_total: int
    memory: int | None
    gpus: list[str]


class Loaded(msgspec.Struct, frozen=True):
    """A model that was loaded and started.

    Attributes:
        name: what clients call it.
        max_context: most tokens of prompt and output together.
        seconds: until it could serve.
        memory: most bytes that its process had in memory.
    """

    name: str
    max_context: int
    seconds: float
    memory: int


class Checked(msgspec.Struct, kw_only=True):
    """What the process that imported a plugin tells of it, more with each stage.

    Attributes:
        stage: how far it came: ``start``, ``import``, ``options``, ``devices``, ``load`` or ``done``.
        problem: why it can't be used, or None.
        api_version: that it was written for, once it is imported; None for what is no engine.
        options: of the engine, with types and defaults, on one line.
        seconds: that its import took.
        frameworks: those that its import loaded, though only ``create`` should.
        devices: what its framework can compute on.
        threads: that its framework uses unless it is told otherwise.
        loaded: the model, if it was to be loaded.
    """

    stage: str = "start"
    problem: str | None = None
    api_version: int | None = None
    options: str | None = None
    seconds: float | None = None
    frameworks: list[str] = []
    devices: list[str] = []
    threads: int | None = None
    loaded: Loaded | None = None


class PluginReport(msgspec.Struct, kw_only=True):
    """An installed engine or plugin, or one that was asked for and is not there.

    Attributes:
        group: the entry-point group.
        name: the scheme of an engine, the name of a plugin.
        distribution: the name that pip knows; empty if none brings it.
        version: of the distribution.
        spec: what was asked for, or None.
        model: where the spec's model is, or what is known of that.
        checked: what importing it told, or None if it was not imported.
        findings: what to know, and what to do about it.
    """

    group: str
    name: str
    distribution: str = ""
    version: str = ""
    spec: str | None = None
    model: str | None = None
    checked: Checked | None = None
    findings: list[Finding] = []

    @property
    def broken(self) -> bool:
        """It can't be used."""
        return any(finding.level is Level.ERROR for finding in self.findings)


class Report(msgspec.Struct, frozen=True):
    """A diagnosis.

    Attributes:
        machine: what there is to compute with.
        installed: from metadata alone.
        asked: what was imported because somebody asked.
    """

    machine: Machine
    installed: list[PluginReport]
    asked: list[PluginReport]
