"""OpenAI-compatible server for bitsandbytes NF4 models. The wheel calls this package nf4_server: ADR 24."""

__version__ = "0.2.0"

PACKAGE = __name__
"""The name by which other processes import this package: server in a checkout, nf4_server from the wheel."""
