"""The token ids of the mocks: one for each byte, then the control tokens.

A chat is a row of turns, ``<|role|>`` text ``<|end|>``, and an opened assistant turn; a raw prompt has no control
tokens of its own. So a model finds the last user turn in the tokens alone.
"""

from __future__ import annotations

__all__ = ["ASSISTANT", "BYTES", "CONTROL_TOKENS", "END", "SPACE", "USER", "VOCAB_SIZE"]

BYTES = 256
"""Ids below this are the bytes of the text's UTF-8."""

CONTROL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
"""Their ids follow the bytes, in this order."""

END = BYTES
USER = BYTES + CONTROL_TOKENS.index("<|user|>")
ASSISTANT = BYTES + CONTROL_TOKENS.index("<|assistant|>")
SPACE = ord(" ")

VOCAB_SIZE = BYTES + len(CONTROL_TOKENS)
"""Number of ids, without the pieces of a script."""
