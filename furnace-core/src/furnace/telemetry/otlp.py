"""Where traces go when OpenTelemetry's own environment variables name a place."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

__all__ = ["tracer_provider_from_environment"]

logger = logging.getLogger(__name__)

EXPORTER = "opentelemetry.exporter.otlp.proto.http"


@contextlib.contextmanager
def tracer_provider_from_environment() -> Iterator[TracerProvider | None]:
    """Send spans to where OpenTelemetry's own variables say, until the end of the block; None when they name no place.

    Nothing of OpenTelemetry is imported then. Sampling, headers and the service's name are theirs too
    (``OTEL_TRACES_SAMPLER``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_SERVICE_NAME``).
    """
    if not _wanted():
        yield None
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create({} if named else {"service.name": "furnace"})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # Imported by name: an optional package, which the type checker may lack too.
    exporter = importlib.import_module(f"{EXPORTER}.trace_exporter").OTLPSpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter))
    try:
        yield provider
    finally:
        provider.shutdown()


def _wanted() -> bool:
    environment = os.environ
    place = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if (
        not place
        or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    ):
        return False
    # The variables are often set for a whole cluster: they are no reason not to serve.
    protocol = environment.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
    if protocol not in {None, "", "http/protobuf"}:
        logger.warning("no traces are sent: OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf")
        return False
    if not _has_exporter():
        logger.warning("no traces are sent: the exporter is not installed: pip install 'furnace-core[otlp]'")
        return False
    return True


def _has_exporter() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER) is not None
    except ModuleNotFoundError:  # not even the packages around it
        return False
