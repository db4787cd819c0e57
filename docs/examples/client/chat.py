"""Chats with a furnace server through the openai package: one answer in one piece, one as it is made."""

import sys

from openai import OpenAI


def main(base_url: str = "http://127.0.0.1:8080/v1") -> None:
    """Ask the first model of the server twice."""
    client = OpenAI(base_url=base_url, api_key="none")  # no keys are configured, so any will do
    model = client.models.list().data[0].id

    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=64,
    )
    print(answer.choices[0].message.content)

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Tell me a story about a cat."}],
        max_tokens=64,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        elif chunk.usage is not None:
            print(f"\n({chunk.usage.completion_tokens} tokens)")


if __name__ == "__main__":
    main(*sys.argv[1:])
