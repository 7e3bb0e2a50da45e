"""Tokens per second that API processes carry, measured with a stub in place of the engine."""
