"""Use from Python without HTTP: ``furnace.load`` blocks, ``furnace.aload`` is its async twin."""

from furnace.session.async_session import AsyncSession, AsyncTextStream, Loading, aload
from furnace.session.completion import Completion
from furnace.session.session import Session, TextStream, load

__all__ = ["AsyncSession", "AsyncTextStream", "Completion", "Loading", "Session", "TextStream", "aload", "load"]
