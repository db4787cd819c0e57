"""The same in a program that has an event loop of its own."""

import asyncio
import sys

import furnace


async def main(spec: str = "torch:tiny-lm") -> None:
    """Ask for two things at once, which the model computes together."""
    async with furnace.aload(spec) as llm:
        question = llm.chat("What is the capital of France?", max_tokens=32, temperature=0)
        story = llm.chat("Tell me a story about a cat.", max_tokens=32, seed=7)
        for answer in await asyncio.gather(question, story):
            print(answer)

        async for text in llm.stream("Who are you?", max_tokens=32, temperature=0):
            print(text, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
