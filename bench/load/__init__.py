"""A load over HTTP on a running server: `python -m bench.load --help`."""
