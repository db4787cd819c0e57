"""Prompts of a wanted number of tokens, made without the server's tokenizer."""

from __future__ import annotations

import random

import msgspec

from furnace.bench.errors import BenchError
from furnace.bench.lengths import Lengths

__all__ = ["WORDS", "PromptScale", "Prompts", "Request"]

# All of four letters: a byte tokenizer gives each of them five tokens, the space included, and a tokenizer of a
# language model one. Either way every word costs the same, so that a count of words fixes the count of tokens.
# 256 of them, for a random byte to choose one.
WORDS = tuple(
    """
    able acid aged also area army away baby back ball band bank base bath bear beat been beer bell belt best bill bird
    blow blue boat body bomb bond bone book boom born boss both bowl bulk burn bush busy call calm came camp card care
    case cash cast cell chat chip city club coal coat code cold come cook cool cope copy core cost crew crop dark data
    date dawn days dead deal dear debt deep desk dial diet disc disk door dose down draw drew drop drug dual duke dust
    duty each earn ease east easy edge else even ever evil exit face fact fail fair fall farm fast fate fear feed feel
    feet fell felt file fill film find fine fire firm fish five flat flow food foot ford form fort four free from fuel
    full fund gain game gate gave gear gene gift girl give glad goal goes gold golf gone good gray grew grey grow gulf
    hair half hall hand hang hard harm hate have head hear heat held help here hero high hill hire hold hole holy home
    hope host hour huge hung hunt hurt idea inch into iron item jack jean join jump jury just keen keep kent kept kick
    kind king knee knew know lack lady laid lake land lane last late lead left less life lift like line link list live
    load loan lock logo long look lord lose loss lost love luck made mail main make male many mark mass mean meat meet
    menu mile milk mind mine miss mode mood moon more most move much must name near neck need news next nice nine none
    """.split()  # noqa: SIM905 -- as a list it would be 256 lines
)[:256]


class PromptScale(msgspec.Struct, frozen=True):
    """How many tokens a text of ``WORDS`` is.

    Attributes:
        overhead: tokens of a prompt without a word: the chat template.
        tokens_per_word: tokens that each word adds.
    """

    overhead: float = 0.0
    tokens_per_word: float = 1.0

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> PromptScale:
        """From two prompts.

        Args:
            few: words and tokens of the shorter one.
            many: the same of the longer one.

        Returns:
            The line through both; the default where the counts make no sense.
        """
        slope = (many[1] - few[1]) / (many[0] - few[0])
        if slope <= 0:
            return cls()
        return cls(max(few[1] - few[0] * slope, 0.0), slope)

    def words(self, tokens: int) -> int:
        """Words of a prompt that is to have so many tokens; at least 1."""
        return max(1, round((tokens - self.overhead) / self.tokens_per_word))

    def prefix_words(self, tokens: int) -> int:
        """Words that so many tokens of text are."""
        return round(tokens / self.tokens_per_word)


class Request(msgspec.Struct, frozen=True):
    """What one request asks for.

    Attributes:
        prompt: its text.
        output_tokens: most tokens of output.
    """

    prompt: str
    output_tokens: int


class Prompts:
    """The requests of a benchmark: the same for the same seed and place, whoever asks and in whatever order.

    Args:
        scale: of the server's tokenizer.
        prompt: tokens of a prompt, template and prefix included.
        output: tokens of an output.
        shared_prefix: tokens at the beginning that all prompts have in common.
        seed: of all that is random.

    Raises:
        BenchError: the shared prefix leaves no room for a word of a prompt's own.
    """

    def __init__(self, scale: PromptScale, *, prompt: Lengths, output: Lengths, shared_prefix: int, seed: int) -> None:
        if shared_prefix and scale.words(prompt.low) <= scale.prefix_words(shared_prefix):
            raise BenchError(
                f"a shared prefix of {shared_prefix} tokens leaves no room in a prompt of {prompt.low} tokens, of "
                f"which {scale.overhead:.0f} are the chat template"
            )
        self._scale = scale
        self._prompt = prompt
        self._output = output
        self._seed = seed
        self._prefix = _words(random.Random(f"{seed}/prefix"), scale.prefix_words(shared_prefix))

    @staticmethod
    def of_words(count: int, *, seed: int) -> str:
        """A text of so many different words, at most all that there are."""
        return " ".join(random.Random(f"{seed}/text").sample(WORDS, count))

    def request(self, place: str, index: int) -> Request:
        """One request.

        Args:
            place: the part of the benchmark; other places have other prompts.
            index: which one there.
        """
        rng = random.Random(f"{self._seed}/{place}/{index}")
        words = self._scale.words(self._prompt.draw(rng)) - len(self._prefix)
        return Request(" ".join(self._prefix + _words(rng, words)), self._output.draw(rng))


def _words(rng: random.Random, count: int) -> list[str]:
    # Many times faster than rng.choices: a long prompt must not hold up the streams that are being timed.
    return [WORDS[byte] for byte in rng.randbytes(count)]
