"""Spans over OTLP/HTTP, received as a collector receives them."""

from __future__ import annotations

import gzip
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from server.observability.timeline import RequestTimeline
from server.observability.tracing import FinishedRequest, Tracing
from server.types import RequestTimings
from tests.http_servers import Handler, answering

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"


@pytest.fixture
def collector() -> Iterator[tuple[str, queue.Queue[ExportTraceServiceRequest]]]:
    """An endpoint's URL, and what has been posted there."""
    received: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

    class Receiver(Handler):
        def respond(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            received.put(ExportTraceServiceRequest.FromString(body))
            self.answer(200, Content_Type="application/x-protobuf")

    with answering(Receiver) as server:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", received


def spans_of(request: ExportTraceServiceRequest) -> dict[str, Any]:
    return {span.name: span for group in request.resource_spans for scope in group.scope_spans for span in scope.spans}


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


def test_spans_of_a_request(collector: tuple[str, queue.Queue[ExportTraceServiceRequest]]) -> None:
    endpoint, received = collector
    tracing = Tracing(endpoint, "m")
    now = time.monotonic()
    timeline = RequestTimeline(
        arrival=now - 2, first_token=now - 1.5, last_token=now - 1, finished=now - 1, prompt_tokens=7, cached_tokens=4,
        max_tokens=20, generation_tokens=3, finish_reason="stop", timings=RequestTimings(queue=0.25, linear_decode=0.5),
    )  # fmt: skip
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    tracing.record(FinishedRequest("id", 200, now - 2.5, [timeline]), "POST", "/v1/chat/completions", headers)
    since = time.monotonic() - now
    tracing.record(FinishedRequest("other", 503, now - 0.5, []), "POST", "/v1/completions", {})
    tracing.close()
    spans = spans_of(received.get(timeout=60))
    assert set(spans) == {"POST /v1/chat/completions", "chat m", "POST /v1/completions"}
    outer, inner, refused = spans["POST /v1/chat/completions"], spans["chat m"], spans["POST /v1/completions"]
    assert outer.trace_id.hex() == inner.trace_id.hex() == TRACE
    assert outer.parent_span_id.hex() == PARENT
    assert inner.parent_span_id == outer.span_id
    assert 2.49e9 < outer.end_time_unix_nano - outer.start_time_unix_nano < 2.51e9 + 1e9 * since
    assert inner.end_time_unix_nano - inner.start_time_unix_nano == pytest.approx(1e9, rel=0.001)
    assert inner.events[0].name == "first token"
    assert inner.events[0].time_unix_nano - inner.start_time_unix_nano == pytest.approx(0.5e9, rel=0.001)
    assert abs(outer.end_time_unix_nano - time.time_ns()) < 30e9
    found = attributes(inner)
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.request.model"] == "m"
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (7, 3)
    assert found["gen_ai.response.finish_reasons"] == ["stop"]
    assert (found["nf4.queue_s"], found["nf4.linear_decode_s"]) == (0.25, 0.5)
    assert attributes(outer)["nf4.request.id"] == "id"
    assert attributes(refused)["error.type"] == "503"
    assert refused.trace_id != outer.trace_id


def test_without_an_endpoint_nothing_is_imported() -> None:
    code = (
        "import sys\nfrom server.app import create_app\nfrom server.config import Config\ncreate_app(Config())\n"
        "assert 'opentelemetry.sdk' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_dead_endpoint_delays_no_request_and_the_end_only_a_little() -> None:
    tracing = Tracing("http://127.0.0.1:9/v1/traces", "m")
    started = time.monotonic()
    for i in range(100):
        request = FinishedRequest(str(i), 200, started, [RequestTimeline(finish_reason="stop", finished=started)])
        tracing.record(request, "POST", "/v1/completions", {"traceparent": "nonsense"})
    assert time.monotonic() - started < 10
    ended = time.monotonic()
    tracing.close()
    assert time.monotonic() - ended < 5
