"""llama.cpp's speed on a GGUF file, measured as bench.cpu does: PYTHON bench/gguf_peer.py FILE --threads N.

PYTHON is of an environment that has llama-cpp-python, and nothing of this project is imported. Prints JSON: its version, and
tokens per second.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

PROMPT, TOKENS, PREFILL, PREFILL_RUNS = 128, 65, 512, 7
SEQUENCE_TOKENS = 768
FTYPES = {"Q4_0": 2}


def prompt(index: int, length: int) -> list[int]:
    """bench.cpu's prompts."""
    return [10 + (index * 7919 + i * 104729) % 40000 for i in range(length)]


class Sequences:
    """Some sequences that are decoded together, greedily."""

    def __init__(self, model: Any, count: int, threads: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = SEQUENCE_TOKENS * count
        parameters.n_batch = parameters.n_ubatch = PREFILL
        parameters.n_seq_max = count
        parameters.n_threads = parameters.n_threads_batch = threads
        self.count = count
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._batch = llama_cpp.llama_batch_init(PREFILL, 0, 1)

    def clear(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def run(self, tokens: list[tuple[int, int, int, bool]]) -> list[int]:
        """One step of (token, position, sequence, whether logits are wanted); the likeliest tokens where they are."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, sequence, wanted) in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        wanted_rows = [i for i, token in enumerate(tokens) if token[3]]
        return [int(np.argmax(self._logits(i))) for i in wanted_rows]

    def _logits(self, row: int) -> np.ndarray:
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float)), (self._vocabulary,))

    def prefill(self, sequence: int, length: int) -> int:
        """The first token of an answer."""
        ids = prompt(sequence, length)
        return self.run([(token, i, sequence, i == length - 1) for i, token in enumerate(ids)])[0]


def decode(model: Any, count: int, threads: int) -> float:
    """Tokens per second of sequences that decode together, by the median interval."""
    sequences = Sequences(model, count, threads)
    last = [sequences.prefill(i, PROMPT) for i in range(count)]
    seconds = []
    for position in range(PROMPT, PROMPT + TOKENS - 1):
        began = time.perf_counter()
        last = sequences.run([(token, position, i, True) for i, token in enumerate(last)])
        seconds.append(time.perf_counter() - began)
    return count / statistics.median(seconds)


def prefill(model: Any, threads: int) -> float:
    """Tokens per second of a prompt, by the median time to its first token."""
    sequences, seconds = Sequences(model, 1, threads), []
    for _ in range(PREFILL_RUNS + 1):
        sequences.clear()
        began = time.perf_counter()
        sequences.prefill(0, PREFILL)
        seconds.append(time.perf_counter() - began)
    return PREFILL / statistics.median(seconds[1:])


def quantized(file: Path, name: str, folder: Path) -> Path:
    """The model of a GGUF file in another quantization."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.allow_requantize = FTYPES[name], True
    target = folder / f"{name}.gguf"
    if llama_cpp.llama_model_quantize(str(file).encode(), str(target).encode(), ctypes.byref(parameters)):
        raise RuntimeError(f"llama.cpp did not quantize {file} to {name}")
    return target


def main() -> None:
    """Measure, and print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--quantize", choices=FTYPES, help="measure the model in this quantization instead")
    options = parser.parse_args()
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        file = quantized(options.file, options.quantize, Path(folder)) if options.quantize else options.file
        parameters = llama_cpp.llama_model_default_params()
        model = llama_cpp.llama_model_load_from_file(str(file).encode(), parameters)
        if not model:
            raise SystemExit(f"llama.cpp did not load {file}")
        threads = options.threads
        prefill(model, threads)
        found = {f"decode {count}": decode(model, count, threads) for count in (1, 8)}
        found["prefill 512"] = prefill(model, threads)
    print(json.dumps({"version": llama_cpp.__version__, **found}))


if __name__ == "__main__":
    main()
