"""Mixtures of experts: where a checkpoint has their tensors, reading these, and the module that holds them in NF4."""
