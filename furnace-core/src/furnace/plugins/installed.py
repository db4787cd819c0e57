"""What the metadata of installed distributions says of plugins; nothing is imported here."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import TypeVar

from furnace.plugins.errors import describe
from furnace.plugins.hookspecs import PLUGIN_GROUP

__all__ = ["InstalledPlugin", "installed", "installed_plugins"]

PluginT = TypeVar("PluginT", bound="InstalledPlugin")

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class InstalledPlugin:
    """What the metadata says of a plugin; nothing was imported.

    Attributes:
        name: the entry point's name.
        distribution: the name that pip knows.
        version: of the distribution.
        target: ``module`` or ``module:attribute`` of the plugin.
    """

    name: str
    distribution: str
    version: str
    target: str
    entry_point: EntryPoint = field(repr=False, compare=False)

    @property
    def label(self) -> str:
        """Distribution and version, for messages."""
        return f"{self.distribution} {self.version}".rstrip()


def installed_plugins() -> list[InstalledPlugin]:
    """All plugins of the HTTP process, by name; a name that several distributions bring is there several times."""
    return installed(PLUGIN_GROUP, InstalledPlugin)


def installed(group: str, kind: type[PluginT]) -> list[PluginT]:
    """What is in an entry-point group, in the order of names."""
    found = [
        kind(point.name, distribution, version, point.value, point)
        for point, distribution, version in _entry_points_of(group)
    ]
    return sorted(found, key=lambda plugin: (plugin.name, plugin.distribution, plugin.target))


def _entry_points_of(group: str) -> Iterator[tuple[EntryPoint, str, str]]:
    """The entry points of a group, each with the name and version of its distribution.

    A distribution whose metadata can't be read is passed over with a warning.
    """
    seen: set[str] = set()
    for distribution in distributions():
        # Most distributions are passed over here, before their metadata is parsed.
        if group not in (distribution.read_text("entry_points.txt") or ""):
            continue
        name, version = _identity(distribution)
        normalized = re.sub(r"[-_.]+", "-", name).lower()
        if normalized in seen:
            continue  # shadowed by one that comes earlier on sys.path
        seen.add(normalized)
        try:
            entry_points = distribution.entry_points.select(group=group)
        except Exception as error:
            logger.warning("the entry points of %s can't be read: %s", name, describe(error))
            continue
        for point in entry_points:
            yield point, name, version


def _identity(distribution: Distribution) -> tuple[str, str]:
    try:
        metadata = distribution.metadata
    except Exception as error:
        logger.warning("a distribution's metadata can't be read: %s", describe(error))
        return "unknown distribution", ""
    headers = {key: metadata[key] for key in ("Name", "Version") if key in metadata}
    return headers.get("Name") or "unknown distribution", headers.get("Version") or ""
