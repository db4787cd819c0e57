"""Two runs beside each other."""

from __future__ import annotations

from collections.abc import Sequence

from furnace.divergence.position import Position
from furnace.divergence.report import Diff, Divergence, PromptDiff
from furnace.divergence.runs import Run, Settings, Track, encode
from furnace.text import TextPipeline

__all__ = ["compare"]

# The logarithm of one in a thousand: what is less likely is noise.
_LIKELY = -6.9


def compare(a: Run, b: Run, settings: Settings, *, margin: float = 0.05) -> Diff:
    """Compare what A picked with what B wanted, or picked, for the same prompts.

    Args:
        a: of ``run_greedy``.
        b: of ``run_forced``.
        settings: of both.
        margin: how far apart A's two most likely tokens are where it is no toss-up, in logarithms of probability.
    """
    forced = all(track.positions is not None for run in (a, b) for track in run.tracks)
    by_token = a.vocabulary == b.vocabulary and all(track.tokens for run in (a, b) for track in run.tracks)
    prompts = [
        _forced(text, one, two, margin, a.pipeline) if forced else _generated(text, one, two, by_token)
        for text, one, two in zip(settings.prompts, a.tracks, b.tracks, strict=True)
    ]
    return Diff(
        method="forced" if forced else "generated",
        margin=margin,
        a=a.speed,
        b=b.speed,
        prompts=prompts,
        notes=_notes(a, b, settings, forced, by_token),
    )


def _forced(text: str, a: Track, b: Track, margin: float, pipeline: TextPipeline | None) -> PromptDiff:
    # B may have had less room.
    pairs = list(zip(a.positions or (), b.positions or (), strict=False))
    decided = [one.margin > margin for one, _ in pairs]
    equal = [one.token == two.token for one, two in pairs]
    first = next((index for index, same in enumerate(equal) if not same), None)
    divergence = None
    if first is not None:
        one, two = pairs[first]
        divergence = Divergence(
            position=first,
            a=one.token,
            b=two.token,
            a_text=_token_text(pipeline, one.token),
            b_text=_token_text(pipeline, two.token),
            a_lead=one.lead_over(two.token),
            b_lead=two.lead_over(one.token),
        )
    return PromptDiff(
        prompt=text,
        positions=len(pairs),
        equal=sum(equal),
        decided=sum(decided),
        decided_equal=sum(same for same, sure in zip(equal, decided, strict=True) if sure),
        largest=max((_largest(one, two) for one, two in pairs), default=None),
        first=divergence,
    )


def _largest(a: Position, b: Position) -> float:
    """The largest difference over tokens that are likely in A, at least one in a thousand, and known of B."""
    of_b = dict(zip(b.tokens, b.logprobs, strict=True))
    likely = [(token, value) for token, value in zip(a.tokens, a.logprobs, strict=True) if value > _LIKELY]
    return max((abs(value - of_b[token]) for token, value in likely if token in of_b), default=0.0)


def _generated(text: str, a: Track, b: Track, by_token: bool) -> PromptDiff:
    """By tokens where both show the same ones, else by characters."""
    of_a: Sequence[object] = a.tokens if by_token else a.text
    of_b: Sequence[object] = b.tokens if by_token else b.text
    pairs = zip(of_a, of_b, strict=False)
    equal = next((index for index, (one, two) in enumerate(pairs) if one != two), min(len(of_a), len(of_b)))
    first = None
    if equal < max(len(of_a), len(of_b)):
        first = Divergence(
            position=equal,
            a=a.tokens[equal] if by_token and equal < len(a.tokens) else None,
            b=b.tokens[equal] if by_token and equal < len(b.tokens) else None,
            a_text=_behind(a.text, b.text),
            b_text=_behind(b.text, a.text),
        )
    return PromptDiff(prompt=text, positions=equal + (first is not None), equal=equal, first=first)


def _behind(text: str, other: str) -> str:
    """A few characters from where one text leaves the other."""
    same = next((index for index, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other))
    return text[same : same + 20]


def _token_text(pipeline: TextPipeline | None, token: int) -> str:
    return "" if pipeline is None else pipeline.token_bytes(token).decode("utf-8", "replace")


def _notes(a: Run, b: Run, settings: Settings, forced: bool, by_token: bool) -> list[str]:
    notes = []
    if not forced:
        notes.append(
            "one of the engines has a scheduler of its own, or another tokenizer, so B could not be fed A's tokens: "
            "each made its own output, they are compared up to the first difference, and every difference counts"
        )
        if not by_token:
            notes.append("their tokens are not the same, or not shown: what is compared is characters")
    if b.pipeline is not None:
        others = [encode(b.pipeline, prompt, settings) for prompt in settings.prompts]
        apart = sum(own != track.prompt for own, track in zip(others, a.tracks, strict=True))
        if apart:
            notes.append(
                f"B makes other tokens of {apart} of {len(others)} prompts, by its tokenizer or its chat template; "
                "it was given A's"
            )
    shorter = sum(
        len(two.tokens) < len(one.tokens) for one, two in zip(a.tracks, b.tracks, strict=True) if two.positions
    )
    if shorter:
        notes.append(f"{shorter} prompts were compared only as far as B's context goes")
    return notes
