"""What the families beyond Llama have of their own in the metadata of GGUF files, or don't have there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from furnace.checkpoint import CheckpointError, DecoderSpec
from furnace.checkpoint.families import family_for_gguf
from furnace.checkpoint.families.gguf_metadata import spec_from_gguf


def of_gguf(architecture: str, more: tuple[str, ...] = (), /, **keys: object) -> DecoderSpec:
    """What the keys of a GGUF file say; there is nothing in its tensors, and those named in `more` are huge."""
    sizes: dict[str, object] = {
        "block_count": 13,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    keys = sizes | {name.replace("__", "."): value for name, value in keys.items()}
    metadata = {f"{architecture}.{name}": value for name, value in keys.items()} | {
        "general.architecture": architecture
    }
    tensors = {"token_embd.weight": (48, 32)} | dict.fromkeys(more, (1 << 40,))
    shapes = {name: SimpleNamespace(shape=shape) for name, shape in tensors.items()}
    file: Any = SimpleNamespace(metadata=metadata, tensors=shapes)
    return spec_from_gguf(file, family_for_gguf(architecture))


def test_what_gguf_has_no_key_for_is_as_in_llama_cpp() -> None:
    windows = of_gguf("gemma3", attention__sliding_window=8)
    assert [layer for layer in range(13) if windows.window(layer) is None] == [5, 11]
    assert of_gguf("gemma3").sliding_window is None
    assert of_gguf("smollm3").no_rope_layers == {3, 7, 11}
    # 27B is the one whose queries are not scaled by the width of a head.
    assert (of_gguf("gemma2").attention_scale, of_gguf("gemma3").attention_scale) == (None, None)
    assert of_gguf("gemma2", block_count=46).attention_scale == 8**-0.5
    assert of_gguf("gemma3", block_count=62).attention_scale == 8**-0.5
    # The first files say neither the window nor the caps.
    gemma = of_gguf("gemma2")
    assert [gemma.window(layer) for layer in range(3)] == [4096, None, 4096]
    assert (gemma.embedding_scale, gemma.attention_soft_cap, gemma.logit_soft_cap) == (32**0.5, 50.0, 30.0)


def test_newer_gguf_files_say_themselves_which_layers_have_the_window_and_how_those_are_rotated() -> None:
    for pattern in (3, tuple(layer % 3 < 2 for layer in range(13))):
        spec = of_gguf("gemma3", attention__sliding_window=8, attention__sliding_window_pattern=pattern)
        assert [layer for layer in range(13) if spec.window(layer) is None] == [2, 5, 8, 11]
    assert of_gguf("gemma3", attention__sliding_window=8, rope__freq_base_swa=2e4).local_rope_theta == 2e4


@pytest.mark.parametrize(
    ("architecture", "key", "value", "message"),
    [
        ("granite", "logit_scale", 0.0, "granite.logit_scale is 0.0; it must be there and above 0"),
        ("granite", "residual_scale", "1", "granite.residual_scale is '1'; it must be there and of type float"),
        ("gemma2", "rope__dimension_count", 8, "rope.dimension_count differs from the head width, 16"),
        ("phi3", "rope__dimension_count", 7, "rotary_dim is 7"),
        ("olmo2", "attention__sliding_window", 4096, "olmo2.attention.sliding_window is 4096; only 0 is supported"),
        ("granite", "rope__scaling__finetuned", False, "granite.rope.scaling.finetuned is False; only True"),
        ("llama", "expert_count", -1, "expert_used_count is missing"),
        ("gemma2", "attn_logit_softcapping", float("nan"), "attention_soft_cap is nan"),
    ],
)
def test_gguf_keys_that_make_no_sense_are_named(architecture: str, key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        of_gguf(architecture, **{key: value})


def test_a_list_of_factors_that_no_head_has_pairs_for_is_refused_before_it_is_read() -> None:
    with pytest.raises(CheckpointError, match=r"rope_factors_short.weight has more than 65536 factors"):
        of_gguf("phi3", ("rope_factors_long.weight", "rope_factors_short.weight"))
