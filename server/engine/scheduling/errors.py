"""Errors of a step that are a request's own."""

from __future__ import annotations


class DataError(Exception):
    """A request's own data cannot be computed: that request fails, and no other one. The message is one line."""
