"""The entry point: makes `openvino:` engines. Imports neither openvino nor numpy; `create` does."""

from __future__ import annotations

import logging
import platform
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

import furnace
from furnace.contracts import EngineContext, EngineFactory, LlmEngine
from furnace.contracts.errors import quote

if TYPE_CHECKING:
    import openvino

    from furnace.checkpoint import Checkpoint
    from furnace_openvino.decoder import OpenVinoDecoder

__all__ = ["OpenVinoFactory", "OpenVinoOptions", "furnace_engine", "load_decoder"]

logger = logging.getLogger(__name__)

# More finds more, and takes longer at every start.
_PROBE_CONTEXT = 224

_FORMS = {
    "fast": "weights in 8 bits, activations quantized (measured on SmolLM2-135M: KL to fp32 under 0.01), so a close "
    "choice may fall the other way; precision=exact computes with the weights as they are in the file",
    "exact": "weights as they are in the file, activations in fp32",
}

_Count = Annotated[int, msgspec.Meta(ge=1, le=65_536)]


class OpenVinoOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Options of an `openvino:` engine.

    Attributes:
        precision: `exact` computes with the weights as they are in the file. `fast` has them in 8 bits and quantizes
            the activations too: faster, and close (on SmolLM2-135M a KL to fp32 under 0.01 was measured).
        kv_precision: Type of the KV cache. `f32` needs twice the memory of `f16`, `u8` half; with `u8`, text may
            depend on who else is being served.
        threads: Compute threads; None for what furnace found usable.
        max_sequences: Sequences open at once, running and cached.
        max_step_tokens: Prompt tokens in one step: more is faster for prompts, less keeps streams smoother.
    """

    precision: Literal["exact", "fast"] = "fast"
    kv_precision: Literal["f16", "f32", "u8"] = "f16"
    threads: _Count | None = None
    max_sequences: _Count = 32
    max_step_tokens: Annotated[int, msgspec.Meta(ge=32, le=1 << 20)] = 256


class OpenVinoFactory(EngineFactory[OpenVinoOptions]):
    """Makes engines from what `furnace.checkpoint` opens, and from directories with OpenVINO IR, also of the hub."""

    options = OpenVinoOptions

    def create(self, model: str, options: OpenVinoOptions, context: EngineContext) -> LlmEngine:
        """Load a model.

        Raises:
            CheckpointError: The model can't be found or isn't supported.
            MemoryError: There is no address space for its KV cache.
        """
        from furnace.checkpoint import locate, open_checkpoint
        from furnace_openvino.ir_directory import IR_WEIGHTS, holds_ir, ir_text_pipeline, read_ir

        place = locate(model, own_weights=IR_WEIGHTS)
        if holds_ir(place.path):
            # First what costs least to find wrong.
            pipeline = ir_text_pipeline(place, context.chat_template)
            ir = read_ir(place)
            usable = _usable(options, ir.name)
            return furnace.Scheduled(_compiled_decoder(ir.graph, ir.name, ir.max_context, usable, context), pipeline)
        with open_checkpoint(place) as checkpoint:
            pipeline = furnace.TextPipeline.from_checkpoint(checkpoint, chat_template=context.chat_template)
            return furnace.Scheduled(load_decoder(checkpoint, options, context), pipeline)


def load_decoder(checkpoint: Checkpoint, options: OpenVinoOptions, context: EngineContext) -> OpenVinoDecoder:
    """Build a checkpoint's graph, compile and probe it, and return the model.

    Args:
        checkpoint: An open checkpoint; not needed any more afterwards.
        options: What the user asked of the engine.
        context: What the operator decided.
    """
    from furnace_openvino.graph import build_graph

    usable = _usable(options, checkpoint.name)
    faster = "; precision=fast is faster" if options.precision == "exact" else ""
    logger.info("%s: %s%s", checkpoint.name, _FORMS[usable.precision], faster)
    longest = min(checkpoint.spec.max_context, context.max_context or checkpoint.spec.max_context)
    graph = build_graph(checkpoint, precision=usable.precision, context=longest, progress=context.progress)
    return _compiled_decoder(graph, checkpoint.name, longest, usable, context)


def _usable(options: OpenVinoOptions, name: str) -> OpenVinoOptions:
    from furnace_openvino.compiled import usable_precision

    usable = msgspec.structs.replace(options, precision=usable_precision(options.precision))
    if usable != options:
        logger.warning(
            "%s: this processor has no VNNI, which precision=fast needs: precision=exact is used instead", name
        )
    return usable


def _compiled_decoder(
    graph: openvino.Model, name: str, max_context: int, options: OpenVinoOptions, context: EngineContext
) -> OpenVinoDecoder:
    from furnace_openvino.compiled import compile_graph
    from furnace_openvino.decoder import OpenVinoDecoder, cache_inputs
    from furnace_openvino.determinism import find_min_rows
    from furnace_openvino.ir_graph import runtime_reason
    from furnace_openvino.kv_cache import kv_token_bytes

    longest = min(max_context, context.max_context or max_context)
    context.progress("compiling", 0, 1)
    try:
        compiled = compile_graph(
            graph,
            threads=options.threads or context.threads,
            precision=options.precision,
            kv_type=options.kv_precision,
        )

        # What the processor lacks may show only when something is computed.
        min_rows = find_min_rows(
            lambda rows: OpenVinoDecoder(
                compiled, name="probe", max_context=min(longest, _PROBE_CONTEXT), min_rows=rows
            ),
            # Blocks of u8 are rescaled as they fill, which the few steps of a probe need not show.
            hopeless=options.kv_precision == "u8",
        )
    except RuntimeError as error:
        raise RuntimeError(
            f"OpenVINO can't run {name} on this processor ({platform.processor() or platform.machine()}); "
            f"furnace-torch may: --engine torch:MODEL. It said: {quote(runtime_reason(error))}"
        ) from error
    context.progress("compiling", 1, 1)
    if min_rows is None:
        logger.info("%s: text may depend on who else is being served, in close choices", name)
    kv_tokens = context.kv_tokens
    if kv_tokens is None and context.memory_bytes is not None:
        kv_tokens = context.memory_bytes // kv_token_bytes(cache_inputs(compiled))
    return OpenVinoDecoder(
        compiled,
        name=name,
        max_context=longest,
        max_sequences=options.max_sequences,
        max_step_tokens=options.max_step_tokens,
        kv_tokens=kv_tokens,
        min_rows=min_rows or 1,
        deterministic=min_rows is not None,
    )


@furnace.hookimpl
def furnace_engine() -> OpenVinoFactory:
    """Announce the factory to furnace."""
    return OpenVinoFactory()
