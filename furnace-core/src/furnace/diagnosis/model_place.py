"""Whether a model is there, as far as that can be told without the engine."""

from __future__ import annotations

from pathlib import Path

from furnace.contracts.errors import quote
from furnace.plugins.engine_spec import EngineSpec

__all__ = ["find_model"]

# Schemes whose models furnace.checkpoint finds.
_CHECKPOINTS = ("candle", "openvino", "torch")
_ENDINGS = (".gguf", ".safetensors", ".py")


def find_model(spec: EngineSpec) -> tuple[str, bool | None]:
    """Where the model of a spec is, and whether it is there: True, False, or None if only the engine can tell."""
    model = spec.model
    if spec.scheme == "python":
        model = model.rpartition(":")[0]
        if not model.endswith(".py"):
            return f"the module {quote(model)}, which only loading finds", None
    path = _path(model)
    if path is not None and path.exists():
        return f"{path}, {_size(path)}", True
    if model.startswith(("/", ".", "~")) or model.endswith(_ENDINGS):
        return f"there is no file or directory {quote(model)}", False
    if spec.scheme in _CHECKPOINTS:
        return _checkpoint(model)
    return f"{quote(model)}, which only the engine knows", None


def _checkpoint(model: str) -> tuple[str, bool | None]:
    # Imported here: not everybody asks about a checkpoint, and these load numpy and the hub's client.
    from huggingface_hub.constants import HF_HUB_CACHE

    from furnace.checkpoint.checkpoint import BUILT_IN
    from furnace.checkpoint.hub import parse_hub_model

    if model in BUILT_IN:
        return "built in", True
    reference = parse_hub_model(model)
    if reference is None:
        return (
            f"there is no file or directory {quote(model)}, and neither a built-in model ({', '.join(BUILT_IN)}) "
            "nor a name on the hub (org/name)",
            False,
        )
    snapshots = Path(HF_HUB_CACHE, f"models--{reference.repository.replace('/', '--')}", "snapshots")
    if snapshots.is_dir():
        return f"{reference.repository}, in the cache of the hub", True
    return f"{reference.repository}, to be fetched from the hub", None


def _path(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        path.exists()
    except (OSError, ValueError, RuntimeError):
        return None  # too long, with a NUL byte, or in the home of nobody
    return path


def _size(path: Path) -> str:
    return "a directory" if path.is_dir() else f"{path.stat().st_size / 1e6:,.1f} MB"
