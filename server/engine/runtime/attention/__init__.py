"""Attention over the paged cache: base (the interface), one file per backend, factory (which one runs), Triton kernels."""
