"""Whole models on a GPU beside transformers, and the server on them: `python -m bench.e2e --help`."""
