"""A model that echoes its prompt, under the test's control, with a byte-level tokenizer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from furnace.contracts import BatchStepModel, Chunk, Limits, OutOfKvError, Output
from furnace.runtime import recorder, scheduled
from furnace.text import TextPipeline

END = 256
VOCAB = 260


class State:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.released = False


class EchoModel(BatchStepModel):
    """After the prompt it says the prompt's tokens again, then the end token.

    Attributes:
        opened: states that are open.
        before_step: called with each batch; may raise, or wait.
        logits_of: replaces the logits of a sequence, given its tokens.
    """

    def __init__(self, *, name: str = "echo", max_context: int = 512, limits: Limits | None = None) -> None:
        self._name = name
        self._max_context = max_context
        self._limits = limits or Limits(max_open=4, max_step_tokens=64, max_logit_rows=64)
        self.opened: list[State] = []
        self.steps = 0
        self.closed = False
        self.threads: set[int] = set()
        self.before_step: Callable[[Sequence[Chunk]], None] = lambda batch: None
        self.logits_of: Callable[[list[int], np.ndarray], np.ndarray] = lambda tokens, row: row
        self.room: int | None = None
        self.prompt_length: dict[int, int] = {}

    @property
    def name(self) -> str:
        return self._name

    @property
    def max_context(self) -> int:
        return self._max_context

    @property
    def vocab_size(self) -> int:
        return VOCAB

    @property
    def limits(self) -> Limits:
        return self._limits

    def open(self, context: object = None) -> State:
        self.threads.add(threading.get_ident())
        state = State()
        self.opened.append(state)
        return state

    def release(self, state: State) -> None:
        assert not state.released
        state.released = True
        self.opened.remove(state)

    def step(self, batch: Sequence[Chunk]) -> np.ndarray:
        self.threads.add(threading.get_ident())
        self.steps += 1
        self.before_step(batch)
        if self.room is not None:
            held = sum(len(state.tokens) for state in self.opened) + sum(len(chunk.tokens) for chunk in batch)
            if held > self.room:
                raise OutOfKvError
        rows = []
        for chunk in batch:
            state = chunk.state
            assert not state.released
            assert chunk.position == len(state.tokens)
            state.tokens += chunk.tokens
            if chunk.output is Output.LAST:
                rows.append(self.logits_of(state.tokens, self.row(state.tokens)))
        return np.array(rows, np.float32).reshape(-1, VOCAB)

    def row(self, tokens: list[int]) -> np.ndarray:
        """Prompts end with '|', so that the model can tell where the output began."""
        prompt = tokens[: tokens.index(ord("|")) + 1]
        done = len(tokens) - len(prompt)
        row = np.zeros(VOCAB, np.float32)
        row[prompt[done] if done < len(prompt) - 1 else END] = 10.0
        return row

    def close(self) -> None:
        self.closed = True


class Gate:
    """Lets a model take one step at a time: ``step()`` returns when it has begun to wait for the next."""

    def __init__(self, model: EchoModel) -> None:
        self._arrived = threading.Semaphore(0)
        self._go = threading.Semaphore(0)
        self._open = False
        self.batches: list[list[tuple[int, int]]] = []
        self._then = model.before_step
        model.before_step = self._wait

    def _wait(self, batch: Sequence[Chunk]) -> None:
        self.batches.append([(id(chunk.state), len(chunk.tokens)) for chunk in batch])
        if not self._open:
            self._arrived.release()
            assert self._go.acquire(timeout=30)
        self._then(batch)

    def arrived(self) -> None:
        """Wait until the model stands at a step."""
        assert self._arrived.acquire(timeout=30)

    def let(self) -> None:
        """Let that step go."""
        self._go.release()

    def open(self) -> None:
        """Let all steps go from now on."""
        self._open = True
        self._go.release(1000)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine that stalls a thread may need long for its end; no test here closes what hangs."""
    for module in (recorder, scheduled):
        monkeypatch.setattr(module, "_JOIN_SECONDS", 60.0)


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> TextPipeline:
    """256 byte tokens in the order of the bytes, and an end token."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    shown = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: byte_of(char))
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(shown)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}|")
    return TextPipeline.from_files(
        folder / "tokenizer.json", folder / "tokenizer_config.json", folder / "chat_template.jinja"
    )


def byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for."""
    return ord(char) if ord(char) < 256 else _SHIFTED[char]


# The alphabet shows the bytes that are not printable in Latin-1, in order, as the characters from 256 on.
_SHIFTED = {
    chr(256 + i): byte
    for i, byte in enumerate(
        [b for b in range(256) if not (33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255)],
    )
}


@pytest.fixture
def echo() -> type[EchoModel]:
    return EchoModel


@pytest.fixture
def gate() -> type[Gate]:
    return Gate
