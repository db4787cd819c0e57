"""What an API makes of a request body, for the code that answers it."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar, Generic, Protocol, TypeVar

import msgspec

from furnace.contracts import FinishReason, GenerateRequest, Usage
from furnace.server.engines import Model
from furnace.telemetry.names import Operation

__all__ = ["Api", "Job", "NamesModel", "Output", "Renderer", "StreamOptions"]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a streamed response.

    Attributes:
        include_usage: send one more chunk with the usage before the end.
        continuous_usage_stats: put the usage so far on every chunk (an extension).
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NamesModel(Protocol):
    """A decoded request body."""

    @property
    def model(self) -> str:
        """The model id."""


@dataclass(slots=True)
class Output:
    """The whole output of one choice."""

    text: str
    reasoning: str
    reason: FinishReason


class Renderer(abc.ABC):
    """Writes one response in the shape of its API. The bytes of streamed pieces are whole events."""

    @abc.abstractmethod
    def delta(self, index: int, text: str, reasoning: str, usage: Usage | None) -> bytes:
        """A piece of a choice's output, not both texts empty; ``usage`` is given when each chunk is to carry it."""

    @abc.abstractmethod
    def finish(self, index: int, reason: FinishReason, usage: Usage | None) -> bytes:
        """The end of a choice."""

    @abc.abstractmethod
    def usage(self, usage: Usage) -> bytes:
        """The chunk that holds the usage."""

    @abc.abstractmethod
    def whole(self, outputs: list[Output], usage: Usage) -> bytes:
        """The JSON body of a response that is not streamed."""


@dataclass(slots=True)
class Job:
    """A checked request.

    Attributes:
        requests: what to ask the engine, one a choice.
        stream: how to stream, or None to answer in one piece.
        renderer: writes the answer.
        count_param: the field that says how many requests there are, for errors about their number.
    """

    requests: list[GenerateRequest]
    stream: StreamOptions | None
    renderer: Renderer
    count_param: str = "n"


BodyT = TypeVar("BodyT", bound=NamesModel)


class Api(abc.ABC, Generic[BodyT]):
    """One API that generates text."""

    prompt_param: ClassVar[str]
    """The field that holds the prompt, for errors about its length."""
    operation: ClassVar[Operation]
    """What it is in metrics and traces."""

    @abc.abstractmethod
    def decode(self, data: bytes) -> BodyT:
        """Decode a body.

        Raises:
            ApiError: 400, it is not what the API's types say.
        """

    @abc.abstractmethod
    async def plan(self, body: BodyT, model: Model) -> Job:
        """Check a body against bounds and the model's capabilities.

        Raises:
            ApiError: 400, a value can't be served.
            EngineError: the engine refused a part of it.
        """
