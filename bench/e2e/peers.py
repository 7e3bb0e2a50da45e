"""transformers' generate and generate_batch, which the engine is measured beside, on the same kind of weights."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from transformers import GenerationConfig, PreTrainedModel


def generate(model: PreTrainedModel, batch: int, prompt: int, answer: int, first: int) -> float:
    """Decode tokens per second of generate(), from the difference of a run of `answer` tokens and one of `first` tokens."""
    ids = _random_ids(model, batch, prompt)

    def run(tokens: int) -> float:
        return _timed(
            lambda: model.generate(
                ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            ),
            model.device,
        )  # fmt: skip

    run(2)
    return batch * (answer - first) / (run(answer) - run(first))


def generate_batch(model: PreTrainedModel, batch: int, prompt: int, answer: int, first: int) -> float:
    """Decode tokens per second of generate_batch(), transformers' continuous batching, measured like generate()."""
    prompts = _random_ids(model, batch, prompt).tolist()

    def run(tokens: int) -> float:
        # No token may end an answer, and -1 is not in the vocabulary.
        config = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

        def once() -> None:
            outputs = model.generate_batch(prompts, generation_config=config)
            lengths = [len(output.generated_tokens) for output in outputs.values()]
            if lengths != [tokens] * batch:
                raise RuntimeError(f"generate_batch gave {lengths} tokens, {tokens} each of {batch} were asked for")

        return _timed(once, model.device)

    run(2)
    return batch * (answer - first) / (run(answer) - run(first))


def prefill(model: PreTrainedModel, batch: int, length: int) -> float:
    """Prompt tokens per second of generate() with one new token, the faster of two runs."""
    ids = _random_ids(model, batch, length)

    def run() -> float:
        return _timed(lambda: model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0), model.device)

    run()
    return batch * length / min(run(), run())


def _random_ids(model: PreTrainedModel, batch: int, length: int) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    return torch.randint(vocabulary // 20, vocabulary - vocabulary // 20, (batch, length), device=model.device)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    started = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - started
