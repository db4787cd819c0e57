"""Every metric there is: names, labels, help and buckets, in one place.

A measurement has up to two kinds of names: OpenTelemetry's for generative AI, and those of vLLM, for which dashboards
exist. Both are filled from the same numbers, so they never disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from furnace.telemetry.metrics import Outcome

__all__ = [
    "DISTRIBUTIONS",
    "FINISHED_REASONS",
    "INSTRUMENTS",
    "PROVIDER",
    "DistributionNames",
    "Instrument",
    "Operation",
    "exposed_names",
]

Operation = Literal["chat", "text_completion"]
"""What a client asked for, as OpenTelemetry calls it (``gen_ai.operation.name``)."""

PROVIDER = "furnace"
"""Of ``gen_ai.provider.name``."""

FINISHED_REASONS: dict[Outcome, str] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "stop",
    "content_filter": "stop",
    "cancelled": "abort",
    "error": "error",
}
"""vLLM's word for each outcome."""

# From a model that answers at once to a queue of minutes.
_WAITS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0),
)
# Around the speed of reading, 0.1 to 0.2 s a token, close together: there a difference is felt.
_GAPS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 10.0),
)
_WHOLES = (
    *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
    *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36),
)
_TOKENS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0)


@dataclass(frozen=True, slots=True)
class DistributionNames:
    """The names of one distribution.

    Attributes:
        field: of ``Latencies``.
        text: the help.
        buckets: their upper bounds.
        gen_ai: OpenTelemetry's name, as Prometheus writes it, or None when it has none.
        token_type: the label ``gen_ai_token_type``, if that name has it.
        vllm: vLLM's names; one that it renamed has both.
    """

    field: str
    text: str
    buckets: tuple[float, ...]
    gen_ai: str | None
    vllm: tuple[str, ...]
    token_type: Literal["input", "output"] | None = None


DISTRIBUTIONS = (
    DistributionNames(
        "first_token",
        "Time from the arrival of a request to its first token.",
        _WAITS,
        "gen_ai_server_time_to_first_token_seconds",
        ("vllm:time_to_first_token_seconds",),
    ),
    DistributionNames(
        "inter_token",
        "Time between two tokens of a choice as they are sent, for every token after the first.",
        _GAPS,
        None,
        ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    ),
    DistributionNames(
        "per_token",
        "Mean time between the tokens of a completed request.",
        _GAPS,
        "gen_ai_server_time_per_output_token_seconds",
        ("vllm:request_time_per_output_token_seconds",),
    ),
    DistributionNames(
        "queue",
        "Time from the admission of a request until the model begins with it.",
        _WAITS,
        None,
        ("vllm:request_queue_time_seconds",),
    ),
    DistributionNames(
        "prefill",
        "Time from when the model begins with a request to its first token.",
        _WAITS,
        None,
        ("vllm:request_prefill_time_seconds",),
    ),
    DistributionNames(
        "decode",
        "Time from the first token of a request to its end.",
        _WHOLES,
        None,
        ("vllm:request_decode_time_seconds",),
    ),
    DistributionNames(
        "duration",
        "Time from the arrival of a request to its end, however it ended.",
        _WHOLES,
        "gen_ai_server_request_duration_seconds",
        ("vllm:e2e_request_latency_seconds",),
    ),
    DistributionNames(
        "prompt_tokens",
        "Tokens of prompts, by request.",
        _TOKENS,
        "gen_ai_client_token_usage",
        ("vllm:request_prompt_tokens",),
        "input",
    ),
    DistributionNames(
        "output_tokens",
        "Generated tokens, by request.",
        _TOKENS,
        "gen_ai_client_token_usage",
        ("vllm:request_generation_tokens",),
        "output",
    ),
)


@dataclass(frozen=True, slots=True)
class Instrument:
    """An instrument of OpenTelemetry that is read when somebody looks.

    Attributes:
        name: with dots; ``vllm.x`` is exposed as ``vllm:x``.
        kind: a counter gets the suffix ``_total``.
        text: the help.
        source: where its value is: ``metrics`` (``LlmMetrics``), ``stats`` (``SchedulerStats``), ``health``,
            ``tokens`` (``LlmMetrics`` and the ``Usage`` of requests that have not ended), or ``computed``.
        field: which one there.
        seconds: whether it counts seconds.
    """

    name: str
    kind: Literal["counter", "gauge"]
    text: str
    source: Literal["metrics", "stats", "health", "tokens", "computed"]
    field: str
    seconds: bool = False

    @property
    def exposed(self) -> str:
        """Its name at ``/metrics``."""
        vendor, _, rest = self.name.partition(".")
        name = f"vllm:{rest}" if vendor == "vllm" else self.name.replace(".", "_")
        return name + ("_seconds" if self.seconds else "") + ("_total" if self.kind == "counter" else "")


INSTRUMENTS = (
    Instrument("vllm.prompt_tokens", "counter", "Tokens of prompts.", "tokens", "prompt_tokens"),
    Instrument("vllm.generation_tokens", "counter", "Generated tokens.", "tokens", "completion_tokens"),
    Instrument(
        "vllm.prefix_cache_queries",
        "counter",
        "Tokens that were looked for in the prefix cache.",
        "tokens",
        "prompt_tokens",
    ),
    Instrument("vllm.prefix_cache_hits", "counter", "Tokens found there.", "tokens", "cached_tokens"),
    Instrument("vllm.request_success", "counter", "Ended requests by finished_reason.", "computed", "request_success"),
    Instrument(
        "vllm.num_preemptions",
        "counter",
        "How often a sequence lost its state to others, to be computed again.",
        "stats",
        "preemptions",
    ),
    Instrument("vllm.num_requests_running", "gauge", "Requests in the model.", "computed", "running"),
    Instrument("vllm.num_requests_waiting", "gauge", "Requests in the queue.", "stats", "waiting"),
    Instrument(
        "vllm.kv_cache_usage_perc", "gauge", "Part of the KV cache that running requests use, 0 to 1.", "computed", "kv"
    ),
    Instrument("furnace.requests", "counter", "Requests that named this model.", "metrics", "requests"),
    Instrument("furnace.requests.rejected", "counter", "Requests refused before any output.", "metrics", "rejected"),
    Instrument("furnace.requests.finished", "counter", "Ended requests by outcome.", "computed", "finished"),
    Instrument("furnace.requests.open", "gauge", "Admitted requests that have not ended.", "metrics", "running"),
    Instrument("furnace.steps", "counter", "Steps of the model.", "stats", "steps"),
    Instrument("furnace.step.time", "counter", "Time inside the model.", "stats", "step_seconds", seconds=True),
    Instrument("furnace.prefill.tokens", "counter", "Prompt tokens computed.", "stats", "prefill_tokens"),
    Instrument("furnace.decode.tokens", "counter", "Tokens generated, as it happens.", "stats", "decode_tokens"),
    Instrument("furnace.prefix.hits", "counter", "Sequences that began with a kept prefix.", "stats", "prefix_hits"),
    Instrument("furnace.prefix.evictions", "counter", "Kept prefixes that were given up.", "stats", "evictions"),
    Instrument("furnace.kv.used", "gauge", "KV tokens that running requests use.", "stats", "kv_used"),
    Instrument("furnace.kv.cached", "gauge", "KV tokens kept for prompts to come.", "stats", "kv_cached"),
    Instrument("furnace.kv.size", "gauge", "KV tokens there are, if bounded.", "stats", "kv_total"),
    Instrument(
        "furnace.engine.restarts", "counter", "How often an engine process died in service.", "health", "restarts"
    ),
)


def exposed_names() -> set[str]:
    """The name of every metric at ``/metrics``."""
    names = {instrument.exposed for instrument in INSTRUMENTS}
    for distribution in DISTRIBUTIONS:
        names.update(distribution.vllm)
        if distribution.gen_ai is not None:
            names.add(distribution.gen_ai)
    return names
