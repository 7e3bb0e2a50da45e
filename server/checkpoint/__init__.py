"""Checkpoints: the embedded model, resolving a name to a folder, checking it, loading it.

loading (torch, transformers, bitsandbytes) is imported by the engine process only.
"""
