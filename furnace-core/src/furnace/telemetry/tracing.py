"""One span a request, when somebody collects them."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, TracerProvider, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from furnace.contracts import Started, Usage
from furnace.telemetry.names import PROVIDER, Operation

__all__ = ["Header", "RequestSpan", "Tracing", "trace_context"]

Header = Callable[[bytes], bytes | None]
"""Reads a header of a request by its lower-case name."""

LONGEST_HEADER = 512


class RequestSpan:
    """The span of one request; made by ``Tracing``.

    Attributes:
        context: trace context headers for whoever works on the request next.
        trace_id: in hexadecimal.
    """

    def __init__(self, span: Span, operation: Operation, context: dict[str, str]) -> None:
        self._span = span
        self._operation = operation
        self.context = context
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    def named(self, model: str) -> None:
        """The client asked for this model, which exists."""
        self._span.update_name(f"{self._operation} {model}")
        self._span.set_attribute("gen_ai.request.model", model)
        self._span.set_attribute("gen_ai.response.model", model)

    def started(self, event: Started) -> None:
        """The request left the queue."""
        self._span.add_event(
            "furnace.started", {"prompt_tokens": event.prompt_tokens, "cached_tokens": event.cached_tokens}
        )

    def first_token(self) -> None:
        """The prompt is computed and the first token there."""
        self._span.add_event("furnace.first_token")

    def decoded(self) -> None:
        """The last token was made, or given up."""
        self._span.add_event("furnace.decode_end")

    def end(self, status: int, outcome: str, usage: Usage) -> None:
        """The answer is complete.

        Args:
            status: of HTTP; 0 when there was none.
            outcome: as in the log.
        """
        span = self._span
        span.set_attribute("furnace.outcome", outcome)
        span.set_attribute("gen_ai.usage.input_tokens", usage.prompt_tokens)
        span.set_attribute("gen_ai.usage.output_tokens", usage.completion_tokens)
        span.set_attribute("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens)
        if status:
            span.set_attribute("http.response.status_code", status)
        if outcome in {"cancelled", "error", "rejected"}:
            span.set_attribute("error.type", outcome)
        elif outcome:
            span.set_attribute("gen_ai.response.finish_reasons", [outcome])
        if outcome == "error" or status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end()


class Tracing:
    """Makes spans.

    Args:
        provider: where they go.
    """

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("furnace")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, operation: Operation, request_id: str, header: Header) -> RequestSpan:
        """A span under the one that the client names, if it names one."""
        # Not the current context: what a host application has open there is another matter.
        parent = self._propagator.extract(trace_context(header), Context())
        attributes = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "furnace.request_id": request_id,
        }
        span = self._tracer.start_span(operation, parent, SpanKind.SERVER, attributes)
        context: dict[str, str] = {}
        self._propagator.inject(context, set_span_in_context(span, Context()))
        return RequestSpan(span, operation, context)


def trace_context(header: Header) -> dict[str, str]:
    """A request's trace context headers, as far as they are short and plain."""
    context = {}
    for name in ("traceparent", "tracestate"):
        value = header(name.encode())
        if value is not None and len(value) <= LONGEST_HEADER and value.isascii():
            context[name] = value.decode()
    return context
