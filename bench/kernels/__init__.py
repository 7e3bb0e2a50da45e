"""The kernel benchmark: python -m bench.kernels."""
