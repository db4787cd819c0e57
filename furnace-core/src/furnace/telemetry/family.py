"""A metric that a plugin adds to ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec

from furnace.contracts.errors import quote

__all__ = ["MetricFamily", "checked_family"]

_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_TAKEN = ("furnace_", "gen_ai_", "vllm_")
_SUFFIXES = ("_total", "_created", "_bucket", "_sum", "_count", "_info")

Samples = float | Mapping[tuple[str, ...], float]
"""One number, or one for each combination of label values."""


class MetricFamily(msgspec.Struct, frozen=True, kw_only=True):
    """A metric that a plugin adds to ``/metrics``.

    Attributes:
        name: as it is exposed: letters, digits and underscores. A counter's ends in ``_total``, a gauge's does not.
            Names that begin with ``furnace_``, ``vllm_`` or ``gen_ai_`` are furnace's.
        help: one line for people.
        kind: a ``counter`` only grows, a ``gauge`` goes up and down.
        read: gives the values, on the event loop at each scrape; it must not block. A number, or with labels a mapping
            from their values, in the order of ``labels``.
        labels: names of the labels.
    """

    name: str
    help: str
    kind: Literal["counter", "gauge"]
    read: Callable[[], Samples]
    labels: tuple[str, ...] = ()


def checked_family(family: object, taken: Iterable[str]) -> MetricFamily:
    """A metric that can be added.

    Args:
        family: what a plugin gave.
        taken: names that others have.

    Raises:
        ValueError: it can't; the message is the end of a sentence about the plugin.
    """
    if not isinstance(family, MetricFamily):
        raise ValueError(f"gives {quote(family)} as a metric, which is no furnace.telemetry.MetricFamily")
    _check_name(family, taken)
    name = family.name
    if not isinstance(family.help, str) or not family.help.isprintable() or not family.help:
        raise ValueError(f"has a metric {name} whose help is not one line of text")
    if not isinstance(family.labels, tuple):
        raise ValueError(f"has a metric {name} whose labels are no tuple: write labels=({quote(family.labels)},)")
    for label in family.labels:
        if not isinstance(label, str) or not _NAME.fullmatch(label) or label.startswith("__"):
            raise ValueError(
                f"has a metric {name} with the label {quote(label)}, but a label is letters, digits and underscores"
            )
    if len(set(family.labels)) < len(family.labels):
        raise ValueError(f"has a metric {name} with a label twice")
    return family


def _check_name(family: MetricFamily, taken: Iterable[str]) -> None:
    name = family.name
    if not isinstance(name, str) or not _NAME.fullmatch(_stem(name)):
        raise ValueError(f"has a metric {quote(name)}, but a name is letters, digits and underscores")
    if family.kind not in ("counter", "gauge"):
        raise ValueError(f"has a metric {name} of the kind {quote(family.kind)}, which is neither counter nor gauge")
    if family.kind == "counter" and not name.endswith("_total"):
        raise ValueError(f"has a counter {name}; call it {name}_total")
    if family.kind == "gauge" and name.endswith(_SUFFIXES):
        raise ValueError(f"has a gauge {name}, but names of gauges end in none of {', '.join(_SUFFIXES)}")
    if name.startswith(_TAKEN):
        raise ValueError(f"has a metric {name}, but names that begin with {', '.join(_TAKEN)} are furnace's")
    if _stem(name) in map(_stem, taken):
        raise ValueError(f"has a metric {name}, and there is one of that name already")


def _stem(name: str) -> str:
    # A counter and a gauge may not differ by the suffix alone: they would be one family.
    return name.removesuffix("_total")
