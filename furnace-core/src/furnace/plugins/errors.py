"""What can go wrong with plugins, and between a spec and an engine. Every message is one line to act on.

PluginError
├── EngineSpecError        the spec can't be read (a ValueError as well)
├── EngineOptionError      an option is unknown, missing or has a bad value (a ValueError as well)
├── UnknownSchemeError     no installed distribution has the scheme
├── DuplicateSchemeError   several have it
├── UnknownPluginError     no installed distribution has the plugin that is to be left out
├── BrokenPluginError      the plugin can't be imported, has no proper hook, or is for another version
└── EngineLoadError        the plugin's ``create`` failed, or made something else than an engine
"""

from __future__ import annotations

import re

__all__ = [
    "BrokenPluginError",
    "DuplicateSchemeError",
    "EngineLoadError",
    "EngineOptionError",
    "EngineSpecError",
    "PluginError",
    "UnknownPluginError",
    "UnknownSchemeError",
    "describe",
]

MESSAGE_LIMIT = 600

# Built-in exceptions that code raises with a message for people. Of the others (KeyError, TypeError, SystemExit...)
# the message alone says nothing.
_SPEAKING = (ValueError, RuntimeError, OSError, ImportError)


class PluginError(Exception):
    """An engine or another plugin can't be had; the message says why on one line."""


class EngineSpecError(PluginError, ValueError):
    """A spec that can't be read."""


class EngineOptionError(PluginError, ValueError):
    """An option that the engine does not have, lacks, or can't take."""


class UnknownSchemeError(PluginError):
    """No installed distribution brings the scheme."""


class DuplicateSchemeError(PluginError):
    """Several installed distributions bring the scheme."""


class UnknownPluginError(PluginError):
    """No installed distribution brings a plugin of this name."""


class BrokenPluginError(PluginError):
    """An installed plugin can't be used."""


class EngineLoadError(PluginError):
    """A plugin was found, but made no engine."""


def describe(error: BaseException) -> str:
    """An exception on one line: its message, with the type in front where the message alone would be a riddle."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        text = f"no module named {error.name!r} (if its distribution has the same name: pip install {package})"
    elif isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.strerror}: {error.filename}"
    else:
        text = str(error).strip()
        builtin = type(error).__module__ == "builtins"
        if not text or (builtin and not isinstance(error, _SPEAKING)):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    # Messages of other people's code may hold line breaks and terminal control characters.
    text = re.sub(r"\s+", " ", text)
    text = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"
