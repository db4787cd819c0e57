"""Opens model files: mapped into memory, or read whole when they are small."""

from __future__ import annotations

import json
import mmap
from pathlib import Path

from furnace.checkpoint.errors import CheckpointError
from furnace.contracts.errors import quote

__all__ = ["map_file", "parse_json_object", "read_json_object"]


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file, read-only.

    Raises:
        CheckpointError: It is missing, empty, not a regular file or can't be read.
    """
    _require_file(path)
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(f"{path}: the file is empty") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None


def read_json_object(path: Path, max_bytes: int) -> dict[str, object]:
    """Read a small JSON file whose top level is an object.

    Args:
        path: The file.
        max_bytes: A larger file is refused unread.

    Raises:
        CheckpointError: It can't be read, is too large, or is no JSON object without duplicate keys.
    """
    _require_file(path)
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise CheckpointError(f"{path}: {size} bytes is too large for this file; at most {max_bytes} are read")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from None
    return parse_json_object(data, str(path))


def parse_json_object(data: bytes, what: str) -> dict[str, object]:
    """Parse JSON whose top level is an object; `what` begins the error message.

    Raises:
        CheckpointError: It is no JSON object, or an object in it has a key twice.
    """

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        members: dict[str, object] = {}
        for key, member in pairs:
            if key in members:
                raise CheckpointError(f"{what}: the key {quote(key)} appears twice")
            members[key] = member
        return members

    try:
        value = json.loads(data, object_pairs_hook=unique)
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise CheckpointError(f"{what}: not valid JSON: {reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{what}: the top level is not a JSON object")
    return value


def _require_file(path: Path) -> None:
    # Opening a pipe would block, and opening a device may do anything.
    if not path.is_file():
        reason = "not a regular file" if path.exists() else "no such file"
        raise CheckpointError(f"{path}: {reason}")
