"""The model's states, each with one owner, each released once."""

from __future__ import annotations

import logging

from furnace.contracts import BatchStepModel, OutOfKvError, State

__all__ = ["OpenStates"]

logger = logging.getLogger("furnace.runtime")


class OpenStates:
    """What is open in a model. Used by the model thread.

    An owner is the id of the sequence that has a state, or had it before it was kept for others.

    Args:
        model: makes and takes back the states.
    """

    def __init__(self, model: BatchStepModel) -> None:
        self._model = model
        self._states: dict[int, State] = {}

    def __contains__(self, owner: int) -> bool:
        return owner in self._states

    def __getitem__(self, owner: int) -> State:
        return self._states[owner]

    def open(self, owner: int) -> None:
        """Open an empty state.

        Raises:
            OutOfKvError: no room; nothing changed.
            Exception: the model failed; nothing is open.
        """
        self._states[owner] = self._model.open(None)

    def fork(self, source: int, owner: int, length: int) -> int:
        """Open a state with the first ``length`` tokens of another.

        Returns:
            How many it holds; 0, and without a state, if the model failed.

        Raises:
            OutOfKvError: no room; nothing changed.
        """
        try:
            state, kept = self._model.fork(self._states[source], length)
        except OutOfKvError:
            raise
        except Exception:
            logger.exception("the model could not fork a state; its tokens are computed instead")
            return 0
        self._states[owner] = state
        if not 0 <= kept <= length:
            logger.error("the model kept %d of %d tokens in a fork; they are computed instead", kept, length)
            self.release(owner)
            return 0
        return kept

    def move(self, source: int, owner: int) -> None:
        """Hand a state on."""
        self._states[owner] = self._states.pop(source)

    def truncate(self, owner: int, length: int) -> bool:
        """Cut a state; False, and released, if the model failed."""
        try:
            self._model.truncate(self._states[owner], length)
        except Exception:
            logger.exception("the model could not cut a state back")
            self.release(owner)
            return False
        return True

    def release(self, owner: int) -> None:
        """Give a state back, if the owner has one. A model that fails even here has lost only that state."""
        if owner not in self._states:
            return
        state = self._states.pop(owner)
        try:
            self._model.release(state)
        except Exception:
            logger.exception("the model failed to release a state")

    def release_all(self) -> None:
        """Give everything back."""
        for owner in list(self._states):
            self.release(owner)
