"""Layers that keep a state per sequence, in the place of keys and values."""
