"""An application of your own with the OpenAI API under ``/llm``; run it with ``uvicorn app:app``."""

import os

from litestar import Litestar, asgi, get

import furnace

llm = furnace.Server().llm(os.environ.get("ENGINE", "torch:tiny-lm"))


@get("/")
async def home() -> str:
    return f"The models are {', '.join(llm.models)}. The API is at /llm/v1."


app = Litestar(
    route_handlers=[home, asgi("/llm", is_mount=True)(llm.app)],
    # The host's lifespan starts the engines and closes them at the end.
    lifespan=[lambda app: llm.running()],
)
