"""Tensor parallelism: the processes that compute one model together, and the messages between them."""
