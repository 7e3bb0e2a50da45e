"""Random values for every option: an answer or an error that names something, never a fault of the server.

The model is a small random one: what is looked for is in the API.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.openai.chat_options import UNSUPPORTED_CHAT, ChatOptions
from server.api.routes.completions import UNSUPPORTED_COMPLETION, CompletionRequest
from server.api.routes.messages import UNSUPPORTED_MESSAGE, MessageRequest
from server.api.routes.responses import UNSUPPORTED_RESPONSE, ResponseRequest
from server.api.routes.tokens import Detokenize, TokenizeText
from tests.api.conftest import MODEL, metric, user

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "5", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
ENDPOINTS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/v1/chat/completions": (
        {"model": MODEL, "messages": user("a"), "max_tokens": 1},
        sorted({*ChatOptions.model_fields, *UNSUPPORTED_CHAT} - {"max_tokens", "stream"}),
    ),
    "/v1/completions": (
        {"model": MODEL, "prompt": "a", "max_tokens": 1},
        sorted({*CompletionRequest.model_fields, *UNSUPPORTED_COMPLETION} - {"max_tokens", "stream"}),
    ),
    "/v1/responses": (
        {"model": MODEL, "input": "a", "max_output_tokens": 1},
        sorted({*ResponseRequest.model_fields, *UNSUPPORTED_RESPONSE} - {"max_output_tokens", "stream"}),
    ),
    "/v1/messages": (
        {"model": MODEL, "messages": user("a"), "max_tokens": 1},
        sorted({*MessageRequest.model_fields, *UNSUPPORTED_MESSAGE} - {"max_tokens", "stream"}),
    ),
    "/tokenize": ({"prompt": "a"}, sorted(TokenizeText.model_fields)),
    "/detokenize": ({"tokens": [5]}, sorted(Detokenize.model_fields)),
}
# Known structures with random values in them reach further than random values alone.
INNER: list[tuple[str, Any]] = [
    ("/v1/chat/completions", lambda v: {"tools": [{"type": "function", "function": {"name": "f", "parameters": v}}],
                                        "tool_choice": "required"}),
    ("/v1/chat/completions", lambda v: {"tools": [{"type": "function", "function": {
        "name": "f", "parameters": {"$defs": v, "properties": v, "x-guidance": v}}}], "tool_choice": "required"}),
    ("/v1/chat/completions", lambda v: {"response_format": {"type": "json_schema",
                                                            "json_schema": {"name": "a", "schema": {"properties": v}}}}),
    ("/v1/chat/completions", lambda v: {"structured_outputs": {"json": v}}),
    ("/v1/chat/completions", lambda v: {"chat_template_kwargs": {"x": v, "tools": v}}),
    ("/v1/chat/completions", lambda v: {"messages": [{"role": "assistant", "tool_calls": v, "content": v}]}),
    ("/v1/responses", lambda v: {"input": [{"type": "message", "role": "user", "content": v}]}),
    ("/v1/responses", lambda v: {"input": [v]}),
    ("/v1/responses", lambda v: {"text": {"format": v}, "tool_choice": v, "tools": [v]}),
    ("/v1/messages", lambda v: {"messages": user([{"type": "tool_result", "tool_use_id": "a", "content": v}])}),
    ("/v1/messages", lambda v: {"messages": user(v), "system": v}),
    ("/v1/messages", lambda v: {"tools": [{"name": "f", "input_schema": v}], "tool_choice": v}),
]  # fmt: skip


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_random_options(long_context: httpx.Client, path: str) -> None:
    base, names = ENDPOINTS[path]
    faults = metric(long_context, "nf4_request_rejections_total", reason="internal_error")

    @given(changes=st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=2))
    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    def run(changes: dict[str, Any]) -> None:
        answer = long_context.post(path, json=base | changes)
        assert answer.status_code in (200, 400, 404), (changes, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert path == "/v1/messages" or (error["param"] is not None and error["code"]), (changes, error)

    run()
    assert metric(long_context, "nf4_request_rejections_total", reason="internal_error") == faults


@pytest.mark.parametrize(("path", "change"), INNER)
def test_random_values_inside(long_context: httpx.Client, path: str, change: Any) -> None:
    base, _ = ENDPOINTS[path]
    faults = metric(long_context, "nf4_request_rejections_total", reason="internal_error")

    @given(value=VALUES)
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    def run(value: Any) -> None:
        answer = long_context.post(path, json=base | change(value))
        assert answer.status_code in (200, 400), (value, answer.text)

    run()
    assert metric(long_context, "nf4_request_rejections_total", reason="internal_error") == faults
