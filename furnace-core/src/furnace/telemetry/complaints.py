"""A log of what other people's code does wrong, which can't be filled by doing it often."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Complaints"]

_SECONDS = 60.0


class Complaints:
    """Logs each subject at once, and then at most once a minute with how often it was left unsaid.

    Args:
        logger: gets the records, as errors.
        clock: in seconds.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        # By subject: when it may be logged again, and how often it was not.
        self._silent: dict[str, tuple[float, int]] = {}

    def about(self, subject: str, error: BaseException | None = None) -> None:
        """Something went wrong.

        Args:
            subject: the message; those that are equal share the minute, so it holds nothing that varies.
            error: shown as a traceback.
        """
        now = self._clock()
        until, unsaid = self._silent.get(subject, (now, 0))
        if now < until:
            self._silent[subject] = (until, unsaid + 1)
            return
        self._silent[subject] = (now + _SECONDS, 0)
        more = f" ({unsaid} times more since it was last said)" if unsaid else ""
        self._logger.error("%s%s", subject, more, exc_info=error)
