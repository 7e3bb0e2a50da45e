"""Attention of decode steps: how keys are divided, its Triton and its compiled kernel, and their trial."""
