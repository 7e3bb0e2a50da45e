"""Marks of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def with_rest(values: Iterable[Any], quick: Callable[[Any], bool] | Iterable[Any]) -> list[Any]:
    """Parameters of a test, all but the quick ones with the marker `rest`: `make test` has the quick ones only.

    quick: some of the values, or what is true of them. A value that is a tuple gives several arguments.
    """
    values = list(values)
    if not callable(quick):
        quick = list(quick)
        assert all(value in values for value in quick), quick
    is_quick = quick if callable(quick) else quick.__contains__
    parameters = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        parameters.append(pytest.param(*arguments, marks=() if is_quick(value) else pytest.mark.rest))
    return parameters
