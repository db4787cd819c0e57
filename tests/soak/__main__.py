"""The session ``soak``: what must hold under load, faults and time. ``python tests/soak --help``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

TESTS = Path(__file__).parents[1]
# What other tests have and these use: clients that leave, and bodies that nobody should send.
sys.path += [str(TESTS / "integration"), str(TESTS.parent / "furnace-core/tests/server")]

from disconnects import disconnects  # noqa: E402 # found with the path above
from endurance import endurance  # noqa: E402 # likewise
from kills import kills  # noqa: E402 # likewise
from overload import overload  # noqa: E402 # likewise
from report import Report  # noqa: E402 # likewise

PARTS = {
    "d": "disconnects: 1,000 seeded interleavings",
    "e": "kills: SIGKILL of engine and HTTP processes with open streams",
    "f": "overload: 500 requests at once, and fairness",
    "g": "endurance: 1,000 idle streams beside mixed load",
}


def main(arguments: Iterable[str] | None = None) -> int:
    """Run the parts that were asked for; the exit status says whether all lines hold."""
    parser = argparse.ArgumentParser(prog="soak", description="Parts: " + "; ".join(map(" ".join, PARTS.items())))
    parser.add_argument("--minutes", type=float, default=30.0, help="how long part g takes (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second in part g (default: 20)")
    parser.add_argument("--parts", default="defg", help="which parts to run (default: defg)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    if unknown := sorted(set(options.parts) - set(PARTS)):
        parser.error(f"--parts: there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if not options.minutes >= 1:
        parser.error(f"--minutes is {options.minutes:g}; below 1 there is nothing to see")
    # Failures are ordered here by the thousand; what counts is asserted.
    logging.getLogger("furnace").setLevel(logging.CRITICAL)
    # So that ``with`` ends the servers.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    report = Report(Console())
    with report, tempfile.TemporaryDirectory(prefix="furnace-soak-") as name:
        folder = Path(name)
        runs: dict[str, Callable[[], None]] = {
            "d": lambda: disconnects(report, options.seed),
            "e": lambda: asyncio.run(kills(report, folder)),
            "f": lambda: asyncio.run(overload(report, folder, options.seed)),
            "g": lambda: asyncio.run(endurance(report, folder, options.seed, options.minutes, options.rate)),
        }
        for part in options.parts:
            report.part = part
            started = time.monotonic()
            try:
                runs[part]()
            except Exception as error:
                report.check("the part runs to its end", False, f"{type(error).__name__}: {error}")
                report.console.print_exception()
            report.console.print(f"{part}  took {time.monotonic() - started:.0f} s", highlight=False)
    report.console.print(report.table())
    return 0 if report.holds else 1


if __name__ == "__main__":
    sys.exit(main())
