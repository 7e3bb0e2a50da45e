"""Random values for every option: an answer or an error that names something, never a fault of the server."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.api.chat_options import UNSUPPORTED_CHAT, ChatOptions
from server.api.completions import UNSUPPORTED_COMPLETION, CompletionRequest
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
}


@pytest.mark.parametrize("path", list(ENDPOINTS))
def test_random_options(http: httpx.Client, path: str) -> None:
    base, names = ENDPOINTS[path]

    @given(changes=st.dictionaries(st.sampled_from(names), VALUES, min_size=1, max_size=2))
    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    def run(changes: dict[str, Any]) -> None:
        answer = http.post(path, json=base | changes)
        assert answer.status_code in (200, 400, 404), (changes, answer.text)
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert error["param"] is not None, (changes, error)
            assert error["code"]

    run()
    assert metric(http, "nf4_request_rejections_total", reason="internal_error") == 0
