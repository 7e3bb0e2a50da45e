"""schemathesis over the server's own OpenAPI document: no fault, no status and no shape that it does not name.

FUZZ_CASES says how many cases there are in all; `make fuzz` takes 2000. The model has two small layers with random
weights: what is looked for is in the API, and answers without a limit end soon.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.api.conftest import MODEL, metric
from tests.clients.random_model import write_random_model
from tests.conftest import RunningServer, start_server

pytestmark = pytest.mark.rest

CASES = int(os.environ.get("FUZZ_CASES", "100"))
SAME = "FUZZ_CASES" not in os.environ
"""Whether the cases are the same in each run, so that a change is judged by itself; `make fuzz` looks for new ones."""
OPERATIONS = [
    *(("POST", path) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")),
    *(("POST", path) for path in ("/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize")),
    *(("POST", path) for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")),
    *(("GET", path) for path in ("/v1/models", "/v1/models/{name}", "/health", "/ping", "/version", "/metrics")),
]
# Answers of these hold the tokens of whole generations, and take most of the time there is for them.
GENERATING = OPERATIONS[:4]
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def fuzzed(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server of its own: short contexts, so that cases without a limit end soon; adapters may be loaded."""
    folder = tmp_path_factory.mktemp("fuzzed")
    arguments = ("--max-model-len", "128", "--allow-runtime-lora")
    with start_server(folder / "log", *arguments, config=write_random_model(folder, embedded_folder)) as running:
        yield running


@pytest.fixture(scope="module")
def document(fuzzed: RunningServer) -> dict[str, Any]:
    """The server's document, which also says what cannot be in it: which models there are."""
    found: dict[str, Any] = httpx.get(f"{fuzzed.base_url}/openapi.json", trust_env=False).json()
    for schema in found["components"]["schemas"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [MODEL]}
    return found


def test_every_operation_is_here(document: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == set(OPERATIONS)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_operation(fuzzed: RunningServer, document: dict[str, Any], method: str, path: str) -> None:
    share = 2 if (method, path) in GENERATING else 1
    count = max(5, CASES * share // (len(OPERATIONS) + len(GENERATING)))
    operation = schemathesis.openapi.from_dict(document)[path][method]
    statuses: Counter[int] = Counter()

    @given(case=operation.as_strategy())
    @settings(
        max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=SAME
    )
    def run(case: schemathesis.Case) -> None:
        response = case.call(base_url=fuzzed.base_url, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    run()
    print(f"{method} {path}: {dict(statuses)}")
    # The document is close enough to what is accepted that cases get to the model.
    assert count < 100 or statuses[200] or (method, path) not in GENERATING
    with fuzzed.client() as http:
        assert metric(http, "nf4_request_rejections_total", reason="internal_error") == 0
        assert http.get("/health").json()["engine_restarts"] == 0
