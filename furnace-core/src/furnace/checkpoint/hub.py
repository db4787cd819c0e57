"""Fetches models from the Hugging Face hub into its usual cache.

Only data is fetched, never code. huggingface_hub reads HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_ENDPOINT itself, and
progress bars are shown only when stderr is a terminal.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from furnace.checkpoint.errors import CheckpointError
from furnace.checkpoint.safetensors import INDEX_NAME, SINGLE_NAME
from furnace.contracts.errors import quote

__all__ = ["HubModel", "fetch", "parse_hub_model"]

_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})"
    r"(?:/(?P<file>[^@\\\0]+\.gguf))?"
    r"(?:@(?P<revision>[\w./-]{1,200}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class HubModel:
    """A model on the hub.

    Attributes:
        repository: `organisation/name`.
        file: Path of a GGUF file in the repository, or None for a repository that has one model only.
        revision: Branch, tag or commit.
    """

    repository: str
    file: str | None
    revision: str


def parse_hub_model(model: str) -> HubModel | None:
    """Parse `org/name`, `org/name/file.gguf`, each also with `@revision`; None if `model` has another form."""
    match = _NAME.fullmatch(model)
    if match is None:
        return None
    file, revision = match["file"], match["revision"]
    if any(part in ("", ".", "..") for text in (file, revision) if text for part in text.split("/")):
        return None
    return HubModel(match["repository"], file, revision or "main")


def fetch(model: HubModel, own_weights: Sequence[str] = ()) -> Path:
    """Return a local copy of a model, downloading what is not in the cache yet.

    Args:
        model: What to fetch.
        own_weights: As for `choose_files`.

    Returns:
        The snapshot's directory, or the path of the GGUF file in it.

    Raises:
        CheckpointError: The repository, revision or file doesn't exist or may not be read, or the hub can't be
            reached and the cache has no copy.
    """
    # Imported here: it takes a quarter of a second, and a model on disk doesn't need it.
    import huggingface_hub
    from huggingface_hub.constants import ENDPOINT
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    where = f"{model.repository} at {ENDPOINT}"
    try:
        # Not list_repo_files: without a network it tries again for half a minute before it says so.
        siblings = huggingface_hub.HfApi().model_info(model.repository, revision=model.revision).siblings
        wanted = choose_files(model, [sibling.rfilename for sibling in siblings or ()], own_weights)
        directory = huggingface_hub.snapshot_download(
            model.repository,
            revision=model.revision,
            # As patterns, because that is all it takes; a name is the pattern of itself.
            allow_patterns=[glob.escape(name) for name in wanted],
            tqdm_class=_progress_bar(),
        )
    except CheckpointError:
        raise
    except GatedRepoError:
        raise CheckpointError(
            f"{where}: the model is gated; accept its terms on its page and set HF_TOKEN to a token of your account"
        ) from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{where}: there is no revision {quote(model.revision)}") from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{where}: no such model, or a private one (set HF_TOKEN to a token that may read it)"
        ) from None
    except Exception as error:
        # Offline, no route, a proxy, a hub that is down: every transport has exceptions of its own, and what
        # matters is the same for all: whether the cache has a copy.
        if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
            raise CheckpointError(f"{where}: the hub refuses the token in HF_TOKEN, or asks for one") from None
        directory = _cached(model, where, error)
    path = Path(directory)
    if model.file is None:
        return path
    if not (path / model.file).is_file():
        raise CheckpointError(f"{where}: there is no file {quote(model.file)}")
    return path / model.file


def choose_files(model: HubModel, files: list[str], own_weights: Sequence[str] = ()) -> list[str]:
    """Return which files of a repository a model needs: its weights, JSON files and chat template.

    Repositories often hold the same weights several times (other formats, other precisions, training states), so
    not everything is fetched.

    Args:
        model: What to fetch.
        files: All files of the repository.
        own_weights: Weight files of a format that only the caller reads, taken first if the repository has them all.

    Raises:
        CheckpointError: There are no weights that furnace reads, or several to choose from.
    """
    # Subfolders hold other forms of the model.
    top = [name for name in files if "/" not in name]
    texts = [name for name in top if name.endswith((".json", ".jinja"))]
    if model.file is not None:
        if model.file not in files:
            present = _listed([name for name in files if name.endswith(".gguf")])
            raise CheckpointError(f"{model.repository}: there is no file {quote(model.file)}; it has {present}")
        return [*texts, model.file]
    if own_weights and set(own_weights) <= set(top):
        return [*texts, *own_weights]
    ggufs = [name for name in top if name.endswith(".gguf")]
    if INDEX_NAME in top:
        # `consolidated` files are a second copy of the weights under other names.
        return texts + [n for n in top if n.endswith(".safetensors") and not n.startswith("consolidated")]
    if SINGLE_NAME in top:
        return [*texts, SINGLE_NAME]
    if len(ggufs) == 1:
        return [*texts, ggufs[0]]
    if ggufs:
        raise CheckpointError(
            f"{model.repository}: it has several GGUF files; choose one as {model.repository}/FILE: {_listed(ggufs)}"
        )
    own = "".join(f"{name}, nor " for name in own_weights[:1])
    raise CheckpointError(f"{model.repository}: it has neither {own}{SINGLE_NAME}, nor {INDEX_NAME}, nor a GGUF file")


def _progress_bar() -> type[Any]:
    from huggingface_hub.utils.tqdm import tqdm

    class TerminalBar(tqdm):
        """A bar that stays silent when stderr is a file or a pipe; the library's counter of files doesn't."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stderr.isatty():
                kwargs["disable"] = True
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call] # tqdm has no types

    return TerminalBar


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    shown = ", ".join(sorted(names)[:12])
    return f"{shown} and {len(names) - 12} more" if len(names) > 12 else shown


def _cached(model: HubModel, where: str, cause: Exception) -> str:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        # No patterns: whether the snapshot is complete shows when its files are opened.
        return huggingface_hub.snapshot_download(
            model.repository, revision=model.revision, local_files_only=True, allow_patterns=[]
        )
    except LocalEntryNotFoundError:
        revision = f"revision {quote(model.revision)}"
        if isinstance(cause, OfflineModeIsEnabled):
            raise CheckpointError(f"{where}: HF_HUB_OFFLINE is set and the cache has no {revision}") from None
        reason = f"{type(cause).__name__}: {str(cause).splitlines()[0][:200] if str(cause) else ''}"
        raise CheckpointError(
            f"{where}: the hub can't be reached ({reason}), and the cache has no {revision}"
        ) from None
