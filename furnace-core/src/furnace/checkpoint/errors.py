"""The one error of this package."""

from __future__ import annotations

__all__ = ["CheckpointError"]


class CheckpointError(ValueError):
    """A model could not be found, fetched or understood.

    The message is one line, names the file or the model, and can be shown to a user as it is.
    """
