"""Errors of the API by the names that a request gave its options."""

from __future__ import annotations

from server.api.http.errors import bad_request, renamed


def test_an_error_has_the_clients_name_and_its_quotes_stay_as_they_are() -> None:
    error = bad_request(
        "Invalid 'messages[0].role': 'messages' is no role; it says messages.", "messages[0].role", None
    )
    found = renamed(error, {"max_tokens": "max_output_tokens", "messages": "input"})
    assert found.param == "input[0].role"
    assert found.message == "Invalid 'input[0].role': 'messages' is no role; it says messages."


def test_an_error_of_another_option_is_left_alone() -> None:
    error = bad_request("Invalid 'stop': too many messages.", "stop", None)
    assert renamed(error, {"messages": "input"}).message == "Invalid 'stop': too many messages."
