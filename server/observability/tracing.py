"""OpenTelemetry spans of finished requests, sent over OTLP/HTTP when an endpoint is configured.

An HTTP request is one span, and each of its sequences is a child span with the attributes of the GenAI semantic
conventions. Spans are made from the timelines when a request has ended, so that nothing is done while it runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from server.observability.timeline import RequestTimeline

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer
    from opentelemetry.util.types import AttributeValue

PROVIDER = "nf4-server"
_OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}


class TracingError(Exception):
    """Spans cannot be sent; the message is one line."""


@dataclass(frozen=True)
class FinishedRequest:
    """An HTTP request that has been answered; started is in seconds of time.monotonic()."""

    request_id: str
    status: int
    started: float
    sequences: Sequence[RequestTimeline]


class Tracing:
    """Makes spans and hands them to OpenTelemetry's own thread, which sends them in batches."""

    def __init__(self, endpoint: str, model: str) -> None:
        """endpoint is a URL, such as http://collector:4318/v1/traces. Raises TracingError without the packages."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as e:
            raise TracingError(f"otlp_traces_endpoint needs pip install 'nf4-server[tracing]' ({e})") from e
        self._model = model
        self._start(OTLPSpanExporter(endpoint=endpoint))

    def _start(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win over the name here.
        self._provider = TracerProvider(resource=Resource({"service.name": PROVIDER}).merge(Resource.create()))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer(PROVIDER)

    def record(self, request: FinishedRequest, method: str, route: str, headers: Mapping[str, str]) -> None:
        """Make the spans of a request; one without sequences, such as a refused one, has the HTTP span only.

        headers are the request's, by lower-case name; traceparent and tracestate name the trace that the spans belong to.
        """
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ended = time.time_ns()
        offset = ended - int(1e9 * time.monotonic())
        span = self._tracer.start_span(
            f"{method} {route}",
            context=TraceContextTextMapPropagator().extract(dict(headers)),
            kind=trace.SpanKind.SERVER,
            start_time=offset + int(1e9 * request.started),
            attributes={
                "http.method": method,
                "http.route": route,
                "http.response.status_code": request.status,
                "nf4.request.id": request.request_id,
            },
        )
        if request.status >= 500:
            _failed(span, str(request.status))
        below = trace.set_span_in_context(span)
        for timeline in request.sequences:
            operation = _OPERATIONS.get(route, "generate_content")
            child = self._tracer.start_span(
                f"{operation} {timeline.adapter or self._model}",
                context=below,
                start_time=offset + int(1e9 * timeline.arrival),
                attributes=self._attributes(operation, timeline),
            )
            if timeline.first_token is not None:
                child.add_event("first token", timestamp=offset + int(1e9 * timeline.first_token))
            if timeline.finish_reason in ("error", None):
                _failed(child, "error")
            child.end(ended if timeline.finished is None else offset + int(1e9 * timeline.finished))
        span.end(ended)

    def close(self) -> None:
        """Send the spans that are left; waits for the endpoint for 3 seconds at most."""
        # The SDK's own time limit does not end an exporter's retries.
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(3)

    def _attributes(self, operation: str, timeline: RequestTimeline) -> dict[str, AttributeValue]:
        model = timeline.adapter or self._model
        found: dict[str, AttributeValue] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.max_tokens": timeline.max_tokens,
            "gen_ai.usage.input_tokens": timeline.prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.generation_tokens,
            "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
            "gen_ai.response.finish_reasons": [timeline.finish_reason or "error"],
        }
        if timeline.time_to_first_token is not None:
            found["nf4.time_to_first_token_s"] = timeline.time_to_first_token
        if timeline.timings is not None:
            timings = timeline.timings
            for name in timings.__struct_fields__:
                unit = "" if name in ("draft_tokens", "accepted_tokens") else "_s"
                found[f"nf4.{name}{unit}"] = getattr(timings, name)
        return found


def _failed(span: Span, kind: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR))
