"""Families of models, as data: how their files map to a `DecoderSpec` and to tensors by role.

A new family is one module with a `Family`, listed here.
"""

from __future__ import annotations

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.families.family import Family
from furnace.checkpoint.families.gemma import GEMMA2, GEMMA3
from furnace.checkpoint.families.granite import GRANITE
from furnace.checkpoint.families.llama import LLAMA
from furnace.checkpoint.families.mistral import MISTRAL, MIXTRAL
from furnace.checkpoint.families.olmo import OLMO2
from furnace.checkpoint.families.phi import PHI3
from furnace.checkpoint.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from furnace.checkpoint.families.smollm3 import SMOLLM3
from furnace.contracts.errors import quote

__all__ = ["FAMILIES", "Family", "family_for_config", "family_for_gguf"]

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MISTRAL,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    GEMMA2,
    GEMMA3,
    PHI3,
    SMOLLM3,
    GRANITE,
    OLMO2,
)


def family_for_config(architectures: object) -> Family:
    """Return the family that a config.json's `architectures` names.

    Raises:
        CheckpointError: It names none that is known; the message lists the known ones.
    """
    name = architectures[0] if isinstance(architectures, list) and architectures else architectures
    for family in FAMILIES:
        if name in family.config_architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.config_architectures)
    raise CheckpointError(f"the architecture {quote(name)} is not supported; known are {known}")


def family_for_gguf(architecture: object) -> Family:
    """Return the family that `general.architecture` of a GGUF file names.

    Raises:
        CheckpointError: It names none that is known; the message lists the known ones.
    """
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    known = ", ".join(name for family in FAMILIES for name in family.gguf_architectures)
    raise CheckpointError(f"the architecture {quote(architecture)} is not supported; known are {known}")
