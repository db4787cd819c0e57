"""The entry point: makes `torch:` engines. Imports no torch and no numpy; `create` does."""

from __future__ import annotations

import logging
import math
import os
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

import furnace
from furnace.contracts import EngineContext, EngineFactory, LlmEngine

if TYPE_CHECKING:
    import torch

    from furnace.checkpoint import Checkpoint, DecoderSpec
    from furnace_torch.decoder import TorchDecoder

__all__ = ["TorchFactory", "TorchOptions", "furnace_engine", "load_decoder"]

logger = logging.getLogger(__name__)

# Without a word from the operator the KV cache may grow to this share of the machine's memory.
_KV_SHARE = 4
_KV_ITEM_BYTES = 4
# On a GPU it takes this share of what the weights leave; the rest is for what steps compute with.
_KV_SHARE_OF_GPU = 0.8

# With a tied head counted again.
_FEW_PARAMETERS = 10_000_000

_Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]


class TorchOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Options of a `torch:` engine.

    Attributes:
        dtype: Type that the weights are kept and multiplied in. `auto` is float32 on the CPU; on a GPU it is bfloat16
            where that has units for it, else float16. The shorter ones save memory, change the results a little, and
            are faster only on processors with matrix units for them.
        device: Where it runs: `cpu`, `cuda`, `cuda:N` or `mps`; `auto` is the first GPU, or the CPU without one.
        threads: Compute threads; None for what furnace found usable.
        max_sequences: Sequences open at once, running and cached.
        max_step_tokens: Prompt tokens in one step: more is faster for prompts, less keeps streams smoother.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Annotated[str, msgspec.Meta(pattern="^(auto|cpu|cuda(:[0-9]{1,3})?|mps)$")] = "auto"
    threads: _Count | None = None
    max_sequences: _Count = 32
    max_step_tokens: Annotated[int, msgspec.Meta(ge=128, le=1 << 20)] = 512


class TorchFactory(EngineFactory[TorchOptions]):
    """Makes engines from what `furnace.checkpoint` opens: `tiny-lm`, directories, GGUF files, hub names."""

    options = TorchOptions

    def create(self, model: str, options: TorchOptions, context: EngineContext) -> LlmEngine:
        """Load a model.

        Raises:
            CheckpointError: The model can't be found or isn't supported.
            ValueError: The device is not there.
            MemoryError: There is no address space for its KV cache, or no room on the device.
        """
        # Before torch is imported: waiting threads that spin steal time from whoever shares the cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        from furnace.checkpoint import open_checkpoint
        from furnace_torch.device import find_device

        if find_device(options.device).type == "cpu":
            logger.info(
                "on a CPU furnace-openvino is several times faster: pip install furnace-openvino, "
                "then --engine openvino:MODEL"
            )
        with open_checkpoint(model) as checkpoint:
            pipeline = furnace.TextPipeline.from_checkpoint(checkpoint, chat_template=context.chat_template)
            return furnace.Scheduled(load_decoder(checkpoint, options, context), pipeline)


def load_decoder(
    checkpoint: Checkpoint, options: TorchOptions, context: EngineContext, *, device_form: bool | None = None
) -> TorchDecoder:
    """Load a checkpoint's weights, probe them, and return the model.

    Sets the number of torch's threads, which is one for the whole process.

    Args:
        checkpoint: An open checkpoint; not needed any more afterwards.
        options: What the user asked of the engine.
        context: What the operator decided.
        device_form: As `TorchDecoder` takes it; for tests.
    """
    import torch

    from furnace_torch.decoder import TorchDecoder
    from furnace_torch.determinism import RowRule, find_row_rule
    from furnace_torch.device import default_dtype, find_device
    from furnace_torch.weights import load_weights

    torch.set_num_threads(options.threads or (1 if is_small(checkpoint.spec) else context.threads))
    device = find_device(options.device)
    dtype = default_dtype(device) if options.dtype == "auto" else getattr(torch, options.dtype)
    weights = load_weights(checkpoint, dtype=dtype, device=device, progress=context.progress)
    # The probe looks at the form for the CPU. Of the other one long runs have shown rows that depend on their company.
    on_cpu = device.type == "cpu" and not device_form
    rule = find_row_rule(weights) if on_cpu else RowRule(min_rows=1, deterministic=False)
    logger.debug(
        "%s: on %s in %s; rows are %sbitwise independent of each other; linears get at least %d rows",
        checkpoint.name,
        device,
        str(dtype).removeprefix("torch."),
        "" if rule.deterministic else "not ",
        rule.min_rows,
    )
    return TorchDecoder(
        weights,
        name=checkpoint.name,
        max_context=context.max_context,
        max_sequences=options.max_sequences,
        max_step_tokens=options.max_step_tokens,
        kv_tokens=_kv_tokens(checkpoint.spec, context, device, dtype),
        min_rows=rule.min_rows,
        deterministic=rule.deterministic,
        device_form=device_form,
    )


def is_small(spec: DecoderSpec) -> bool:
    """Tell whether a second thread costs more than it brings: waiting for each other takes longer than the work.

    tiny-lm alone, on two cores: 123 to 169 tokens a second with two threads, 209 to 243 with one.
    """
    return sum(math.prod(shape) for shape in spec.tensor_shapes().values()) < _FEW_PARAMETERS


def _kv_tokens(spec: DecoderSpec, context: EngineContext, device: torch.device, dtype: torch.dtype) -> int:
    """Return how many tokens the KV cache may hold, called when the weights are where they stay."""
    from furnace_torch.device import free_bytes

    if context.kv_tokens is not None:
        return context.kv_tokens
    if device.type != "cpu":
        memory_bytes, item_bytes = int(free_bytes(device) * _KV_SHARE_OF_GPU), dtype.itemsize
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        memory_bytes, item_bytes = context.memory_bytes or total // _KV_SHARE, _KV_ITEM_BYTES
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * item_bytes
    return max(1, memory_bytes // token_bytes)


@furnace.hookimpl
def furnace_engine() -> TorchFactory:
    """Announce the factory to furnace."""
    return TorchFactory()
