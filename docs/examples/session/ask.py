"""Uses a model in this process, without HTTP."""

import sys

import furnace


def main(spec: str = "torch:tiny-lm") -> None:
    """Ask for a chat, a stream, and a batch of completions."""
    with furnace.load(spec) as llm:
        print(llm.chat("What is the capital of France?", max_tokens=32, temperature=0))

        for text in llm.stream([{"role": "user", "content": "Tell me a story about a cat."}], max_tokens=32, seed=7):
            print(text, end="", flush=True)
        print()

        for completion in llm.complete(["One day, a dog", "One day, a bird"], max_tokens=16):
            print(completion.text, completion.finish_reason, completion.usage.completion_tokens)


if __name__ == "__main__":
    main(*sys.argv[1:])
