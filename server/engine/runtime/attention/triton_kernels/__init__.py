"""The Triton launches of attention on CUDA: decode with its reduction, and the write into the paged cache."""
