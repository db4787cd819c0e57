"""Models and engines with one planted fault each: the proof that the kit finds what authors get wrong.

Beside them are the correct ones of which they are made. ``wrong_models`` lists the faults, each with the test of the
kit that is meant to find it.
"""

from __future__ import annotations

from furnace.testing.wrong import (
    batch_block_faults,
    batch_buffer_faults,
    batch_company_faults,
    batch_error_faults,
    batch_fork_faults,
    batch_promise_faults,
    batch_row_faults,
    batch_sampler_faults,
    batch_state_faults,
    checkpoint_faults,
    engine_cancel_faults,
    engine_ending_faults,
    engine_event_faults,
    engine_life_faults,
    engine_model_faults,
    engine_parameter_faults,
    engine_request_faults,
    engine_text_faults,
    engine_waiting_faults,
    step_faults,
)
from furnace.testing.wrong.registry import Wrong, wrong_models

__all__ = [
    "Wrong",
    "batch_block_faults",
    "batch_buffer_faults",
    "batch_company_faults",
    "batch_error_faults",
    "batch_fork_faults",
    "batch_promise_faults",
    "batch_row_faults",
    "batch_sampler_faults",
    "batch_state_faults",
    "checkpoint_faults",
    "engine_cancel_faults",
    "engine_ending_faults",
    "engine_event_faults",
    "engine_life_faults",
    "engine_model_faults",
    "engine_parameter_faults",
    "engine_request_faults",
    "engine_text_faults",
    "engine_waiting_faults",
    "step_faults",
    "wrong_models",
]
