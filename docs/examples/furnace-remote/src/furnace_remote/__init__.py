"""The scheme ``remote``: another server with the OpenAI API. Importing this loads no HTTP client; ``create`` does."""

from __future__ import annotations

from typing import Annotated

import msgspec

import furnace

__all__ = ["RemoteFactory", "RemoteOptions", "furnace_engine"]


class RemoteOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What follows the ``?`` in ``remote:my-model?url=http://127.0.0.1:9000/v1``.

    Attributes:
        url: where the API is, with ``/v1``.
        key_variable: the environment variable with the key. The key itself is no option: options are shown in logs.
        max_context: most tokens of prompt and output, as far as the server does not say.
        running_usage: ask for token counts on every piece.
        silence: seconds without a byte after which the server is gone.
    """

    url: str
    key_variable: str = "REMOTE_API_KEY"
    max_context: Annotated[int, msgspec.Meta(ge=2)] = 8192
    running_usage: bool = True
    silence: Annotated[float, msgspec.Meta(gt=0)] = 300.0


class RemoteFactory(furnace.EngineFactory[RemoteOptions]):
    """Makes the engines of the scheme ``remote``."""

    api_version = 1
    options = RemoteOptions

    def create(self, model: str, options: RemoteOptions, context: furnace.EngineContext) -> furnace.LlmEngine:
        """Connect to nothing yet; ``start`` does."""
        if not options.url.startswith(("http://", "https://")):
            raise ValueError(f"url is {options.url!r}, but must begin with http:// or https://")
        from furnace_remote.engine import RemoteEngine

        return RemoteEngine(model, options, context.max_context)


@furnace.hookimpl
def furnace_engine() -> RemoteFactory:
    """Give furnace the factory."""
    return RemoteFactory()
