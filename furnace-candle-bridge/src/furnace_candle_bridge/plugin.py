"""The entry point: makes `candle:` engines. Imports neither the native module nor numpy; `create` does."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Annotated

import msgspec

import furnace
from furnace.contracts import EngineContext, EngineFactory, LlmEngine

if TYPE_CHECKING:
    from furnace.checkpoint import Checkpoint, DecoderSpec
    from furnace_candle_bridge.decoder import CandleDecoder

__all__ = ["CandleFactory", "CandleOptions", "furnace_engine", "load_decoder"]

logger = logging.getLogger(__name__)

# Without a word from the operator the KV cache may grow to this share of the machine's memory.
_KV_SHARE = 4
_KV_ITEM_BYTES = 4
_PROBE_CONTEXT = 64

_Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]


class CandleOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Options of a `candle:` engine.

    Attributes:
        threads: Compute threads; None for what furnace found usable.
        max_sequences: Sequences open at once, running and cached.
        max_step_tokens: Prompt tokens in one step: more is faster for prompts, less keeps streams smoother.
    """

    threads: _Count | None = None
    max_sequences: _Count = 32
    max_step_tokens: Annotated[int, msgspec.Meta(ge=32, le=1 << 20)] = 256


class CandleFactory(EngineFactory[CandleOptions]):
    """Makes engines from what `furnace.checkpoint` opens: `tiny-lm`, directories, GGUF files, hub names."""

    options = CandleOptions

    def create(self, model: str, options: CandleOptions, context: EngineContext) -> LlmEngine:
        """Load a model.

        Raises:
            CheckpointError: The model can't be found or isn't supported.
            MemoryError: There is no memory for its weights.
        """
        from furnace.checkpoint import open_checkpoint

        with open_checkpoint(model) as checkpoint:
            pipeline = furnace.TextPipeline.from_checkpoint(checkpoint, chat_template=context.chat_template)
            return furnace.Scheduled(load_decoder(checkpoint, options, context), pipeline)


def load_decoder(checkpoint: Checkpoint, options: CandleOptions, context: EngineContext) -> CandleDecoder:
    """Load a checkpoint's weights, probe the decoder, and return the model.

    Args:
        checkpoint: An open checkpoint; not needed any more afterwards.
        options: What the user asked of the engine.
        context: What the operator decided.
    """
    from furnace_candle_bridge.decoder import CandleDecoder
    from furnace_candle_bridge.determinism import is_independent
    from furnace_candle_bridge.weights import build_model

    spec, name = checkpoint.spec, checkpoint.name
    longest = min(spec.max_context, context.max_context or spec.max_context)
    threads = options.threads or context.threads
    model = build_model(checkpoint, threads=threads, max_context=longest, progress=context.progress)
    probed = CandleDecoder(model, name="probe", vocab_size=spec.vocab_size, max_context=min(longest, _PROBE_CONTEXT))
    deterministic = is_independent(probed)
    logger.info(
        "%s: %s kernels; rows are %sbitwise independent",
        name,
        model.kernels,
        "" if deterministic else "not known to be ",
    )
    return CandleDecoder(
        model,
        name=name,
        vocab_size=spec.vocab_size,
        max_context=longest,
        max_sequences=options.max_sequences,
        max_step_tokens=options.max_step_tokens,
        kv_tokens=_kv_tokens(spec, context.memory_bytes) if context.kv_tokens is None else context.kv_tokens,
        deterministic=deterministic,
    )


def _kv_tokens(spec: DecoderSpec, memory_bytes: int | None) -> int:
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _KV_SHARE
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * _KV_ITEM_BYTES
    return max(1, memory_bytes // token_bytes)


@furnace.hookimpl
def furnace_engine() -> CandleFactory:
    """Announce the factory to furnace."""
    return CandleFactory()
