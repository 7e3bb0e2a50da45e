"""Attention by FlashInfer's kernels, and the tools that it compiles them with."""
