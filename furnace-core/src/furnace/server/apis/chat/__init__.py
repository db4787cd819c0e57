"""``POST /v1/chat/completions``."""

from furnace.server.apis.chat.route import chat_route

__all__ = ["chat_route"]
