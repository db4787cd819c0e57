"""Whether a plugin was written for an API that this furnace speaks."""

from __future__ import annotations

import logging

import furnace
from furnace.contracts.errors import quote

__all__ = ["version_problem"]

logger = logging.getLogger(__name__)


def version_problem(
    version: object, *, api: str, oldest: int, current: int, label: str, distribution: str
) -> str | None:
    """Why a plugin can't be used, as the end of a sentence about it; None if it can.

    One that is used although there is a newer version is named in the log.

    Args:
        version: what it names.
        api: what the number counts: ``contracts`` or ``hooks``.
        oldest: the oldest version that still works.
        current: the newest.
        label: the plugin's distribution and version, for the log.
        distribution: what pip upgrades.
    """
    if not isinstance(version, int) or isinstance(version, bool):
        return f"has the api_version {quote(version)}, which is not an integer"
    speaks = str(current) if oldest == current else f"{oldest} to {current}"
    written = f"was written for {api} version {version}, but furnace {furnace.__version__} speaks version {speaks}"
    if version > current:
        return f"{written}: pip install --upgrade furnace-core"
    if version < oldest:
        return f"{written}: pip install --upgrade {distribution}"
    if version < current:
        logger.warning(
            "%s was written for %s version %d; the next minor version of furnace may not take it: "
            "pip install --upgrade %s",
            label,
            api,
            version,
            distribution,
        )
    return None
