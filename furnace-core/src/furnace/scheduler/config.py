"""What an operator may set of the scheduler."""

from __future__ import annotations

import msgspec

__all__ = ["SchedulerConfig"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the scheduler; None leaves a field to whoever fills it next, and at last to furnace's default.

    Attributes:
        max_queue: most requests that wait (default 256).
        max_queue_tokens: most prompt tokens that wait (default 1,000,000); an empty queue takes any prompt.
        max_running: most sequences in the model at once (default: the model's ``max_open``).
        max_step_tokens: most prompt tokens of a step (default: the model's ``max_step_tokens``).
        queue_deadline: seconds that a request may wait for its first step (default 300).
        max_context: most tokens of prompt and output together (default: the model's).
        kv_tokens: KV tokens to use (default: the model's).
        prefix_cache: take common beginnings of prompts from other sequences, if the model can, and keep the states of
            those that are over (default: yes, but states are kept only where the model bounds its KV cache: else
            nothing says how many tokens there is memory for).
        speculation: guess up to this many next tokens of each sequence from what it has said and been told (default:
            none). Tokens stay the same; they come sooner where the output repeats what was there.
    """

    max_queue: int | None = None
    max_queue_tokens: int | None = None
    max_running: int | None = None
    max_step_tokens: int | None = None
    queue_deadline: float | None = None
    max_context: int | None = None
    kv_tokens: int | None = None
    prefix_cache: bool | None = None
    speculation: int | None = None

    def filled(self, defaults: SchedulerConfig) -> SchedulerConfig:
        """This, with every unset field taken from ``defaults``."""
        return SchedulerConfig(
            **{
                field: value if (value := getattr(self, field)) is not None else getattr(defaults, field)
                for field in self.__struct_fields__
            }
        )
