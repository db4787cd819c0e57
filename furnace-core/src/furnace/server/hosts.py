"""The names that a server on a loopback address answers to.

A web page can have its own name resolve to 127.0.0.1 (DNS rebinding); the visitor's browser then takes what listens
there for that page's server, and lets the page use it. What the page can't choose is the name in the Host header.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

__all__ = ["is_loopback", "loopback_hosts", "may_ask"]


def loopback_hosts(address: str, names: Iterable[str]) -> frozenset[str] | None:
    """The names to answer to besides localhost and addresses; None for all, on an address that others can reach.

    Args:
        address: what the server listens on.
        names: what its operator calls it.
    """
    return frozenset(name.lower().rstrip(".") for name in names) if is_loopback(address) else None


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address; a name other than localhost counts as reachable."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address == "localhost"
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def may_ask(host: bytes, names: frozenset[str]) -> bool:
    """Whether a request with this Host header is meant for us.

    Args:
        host: as it came, with or without a port.
        names: of ``loopback_hosts``.
    """
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        inside, closed, port = text[1:].partition("]")
        return closed == "]" and _is_address(inside) and re.fullmatch(r"(:\d*)?", port, re.ASCII) is not None
    name = text.partition(":")[0].rstrip(".")
    return name == "localhost" or name.endswith(".localhost") or name in names or _is_address(name)


def _is_address(text: str) -> bool:
    # Not only loopback ones: no page can have an address as its name and resolve it elsewhere.
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
