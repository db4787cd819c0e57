"""Seeds, greedy decoding, and what decides the next token."""

from __future__ import annotations

from typing import Any

import msgspec

from furnace.contracts import ChatInput, GenerateRequest, Message, SamplingParams
from furnace.testing.conformance import Conformance, engine_check
from furnace.testing.engine.client import Client
from furnace.testing.golden_logits import MODEL, golden_cases
from furnace.testing.verdict import Inapplicable, require

__all__ = ["SamplingChecks", "undecided"]


class SamplingChecks(Conformance):
    """What is declared to be repeatable is, and parameters are honoured."""

    @engine_check
    async def test_greedy_output_is_the_same_alone_and_in_company(self, client: Client) -> None:
        """Where ``deterministic`` is declared: alone, again, and beside other requests of all lengths."""
        _need_determinism(client)
        await _alone_and_in_company(client, {"temperature": 0.0})

    @engine_check
    async def test_seeded_output_is_the_same_alone_and_in_company(self, client: Client) -> None:
        """The same for sampled output with a seed."""
        _need_determinism(client)
        if not client.can.seed:
            raise Inapplicable("seed is not declared")
        await _alone_and_in_company(client, {"temperature": 1.0, "seed": 1234})

    @engine_check
    async def test_a_seed_makes_sampling_repeatable(self, client: Client) -> None:
        """The same seed gives the same tokens; other seeds and other choices do not always."""
        if not client.can.seed:
            raise Inapplicable("seed is not declared")
        texts = [(await client.answer(undecided(client, seed=seed))).text for seed in (1, 1, 2, 3, 4, 5)]
        if client.can.deterministic:
            require(texts[0] == texts[1], f"seed=1 gave {texts[0]!r} and then {texts[1]!r}. Draw from the seed alone.")
        require(
            len(set(texts)) > 1,
            f"five seeds gave the one text {texts[0]!r}, with temperature=2 and many tokens about as likely. Sample, "
            "with SamplingParams.temperature and seed.",
        )

    @engine_check
    async def test_choices_with_one_seed_differ(self, client: Client) -> None:
        """n choices share the seed; their number makes them differ."""
        if not client.can.seed:
            raise Inapplicable("seed is not declared")
        texts = [(await client.answer(undecided(client, seed=5, choice=choice))).text for choice in range(5)]
        require(
            len(set(texts)) > 1,
            f"five choices with one seed gave the one text {texts[0]!r}. Draw from seed and choice.",
        )

    @engine_check
    async def test_without_a_seed_answers_differ(self, client: Client) -> None:
        """A missing seed is drawn anew for each request."""
        texts = [(await client.answer(undecided(client))).text for _ in range(5)]
        require(
            len(set(texts)) > 1, f"five requests without a seed gave the one text {texts[0]!r}. Draw a seed for each."
        )

    @engine_check
    async def test_without_a_temperature_it_samples(self, client: Client) -> None:
        """The default of ``temperature`` is 1, not 0."""
        requests = [undecided(client, seed=seed) for seed in range(5)]
        texts: dict[float | None, list[str]] = {1.0: [], None: []}
        for temperature, said in texts.items():
            for request in requests:
                params = msgspec.structs.replace(request.params, temperature=temperature)
                said.append((await client.answer(msgspec.structs.replace(request, params=params))).text)
        if len(set(texts[1.0])) == 1:
            raise Inapplicable("with temperature=1 this model says the same for five seeds")
        require(
            len(set(texts[None])) > 1,
            f"five requests without a temperature gave the one text {texts[None][0]!r}, with temperature=1 they gave "
            "several. None is the default, 1; only 0 is greedy.",
        )

    @engine_check
    async def test_the_most_likely_token_is_what_greedy_means(self, client: Client) -> None:
        """``temperature=0`` picks what ``top_k=1``, a tiny ``top_p``, and ``min_p=1`` leave."""
        greedy = await client.repeatable(client.ask(max_tokens=12))
        for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
            params: dict[str, Any] = {name: value}
            narrow = await client.answer(client.ask(max_tokens=12, temperature=1.5, seed=3, **params))
            if not client.can.deterministic and greedy.text != narrow.text:
                raise Inapplicable("the engine does not promise the same logits twice")
            require(
                greedy.text == narrow.text,
                f"with {name}={value} the text is {narrow.text!r}, greedy it is {greedy.text!r}. Both are the most "
                "likely token each time.",
            )

    @engine_check
    async def test_output_goes_on_where_a_prompt_ends(self, client: Client) -> None:
        """A chat and the beginning of its answer as a prompt: the next tokens are those of the answer."""
        if not (client.can.chat and client.can.completions):
            raise Inapplicable("chat and completions are not both declared")
        right = 0
        for text in ("Tell me a story", "Hello", "What is a dog?"):
            chat = ChatInput([Message("user", text)])
            prompt = await client.service.tokenize(chat)
            params = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
            answer = await client.answer(GenerateRequest(input=chat, params=params))
            if len(answer.tokens) < 10:
                raise Inapplicable("the engine reports no token ids")
            onward = await client.answer(client.ask([*prompt, *answer.tokens[:6]], max_tokens=4))
            right += onward.tokens == answer.tokens[6:]
        require(
            right > 0,
            "three answers were cut after 6 tokens and given as prompts, and none went on as it had. A decoded token "
            "and a token of a prompt at the same place must mean the same: check positions and what a token may see.",
        )

    @engine_check
    async def test_a_logit_bias_of_100_decides(self, client: Client) -> None:
        """A token with a bias of 100 is picked, one with -100 is not."""
        plain = await client.answer(client.ask(max_tokens=8))
        if not plain.tokens:
            raise Inapplicable("the engine reports no token ids")
        wanted, first = plain.tokens[-1], plain.tokens[0]
        biased = await client.answer(client.ask(max_tokens=5, logit_bias={wanted: 100.0}))
        require(
            biased.tokens.count(wanted) >= 4,
            f"with logit_bias={{{wanted}: 100}} the tokens are {biased.tokens}. Add the bias to the logits before you "
            "pick.",
        )
        banned = await client.answer(client.ask(max_tokens=1, logit_bias={first: -100.0}))
        require(
            first not in banned.tokens,
            f"with logit_bias={{{first}: -100}} token {first} was picked all the same",
        )

    @engine_check
    async def test_tiny_lm_says_the_references_tokens(self, client: Client) -> None:
        """For engines that load checkpoints: the most likely token after known texts."""
        spec = (self.spec or "").partition("?")[0]
        if not spec.endswith(f":{MODEL}"):
            raise Inapplicable(f"the model is not {MODEL}, whose answers are known")
        for case in golden_cases():
            last = case.top[-1]
            close = last.logits[0] - last.logits[1] <= 2 * self.golden_tolerance * last.logits[0]
            if len(case.tokens) >= client.engine.max_context or close:
                continue
            answer = await client.answer(client.ask(case.tokens, max_tokens=1, endless=False))
            if not answer.tokens:
                raise Inapplicable("the engine reports no token ids")
            require(
                answer.tokens == case.argmax[-1:],
                f"after a prompt of {len(case.tokens)} tokens tiny-lm's most likely token is {case.argmax[-1]}, but "
                f"the engine picked {answer.tokens}",
            )


def undecided(client: Client, *, seed: int | None = None, choice: int = 0) -> GenerateRequest:
    """A request for tokens that are drawn: a dozen of them are made likely, whatever the model would say.

    Raises:
        Inapplicable: nobody knows which ids there are.
    """
    likely = dict.fromkeys(client.tokens(12, "likely"), 90.0)
    return client.ask(temperature=2.0, seed=seed, choice=choice, max_tokens=16, logit_bias=likely)


def _need_determinism(client: Client) -> None:
    if not client.can.deterministic:
        raise Inapplicable("deterministic is not declared")


async def _alone_and_in_company(client: Client, params: dict[str, float | int]) -> None:
    temperature, seed = params["temperature"], params.get("seed")
    request = client.ask("There was a time", max_tokens=32, temperature=temperature, seed=seed)
    alone = await client.answer(request)
    again = await client.answer(request)
    require(
        alone.tokens == again.tokens and alone.text == again.text,
        f"the same request gave {alone.text!r} and then {again.text!r}, but deterministic is declared",
    )
    company = [
        client.ask("x " * (3 + 11 * place), max_tokens=4 + 9 * place, salt=f"company {place}", temperature=1.0)
        for place in range(5)
    ]
    answers = await client.together([*company[:2], request, *company[2:], request])
    for answer in (answers[2], answers[6]):
        require(
            answer.tokens == alone.tokens and answer.text == alone.text,
            f"beside others a request gives {answer.text!r}, alone {alone.text!r}. Declare deterministic only when a "
            "token depends on model, prompt, params, seed, choice and position alone.",
        )
