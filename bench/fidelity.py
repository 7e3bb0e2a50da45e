"""How far the engine's log-probabilities are from those of transformers' own forward pass on the same weights."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from server.engine.core import Engine
from server.types import GenerateRequest, SamplingParams

# Tokens of the prompts: less than a block, more than one, more than a sliding window of 1024.
PROMPTS = (7, 300, 1500)
ANSWER = 24
# A continuation of the longest prompt, most of which is then in the prefix cache.
MORE = 40
# What transformers is given behind a text, to see what other shapes alone change.
PADDING = 17


@dataclass(frozen=True)
class Scored:
    """A text and the log-probabilities that the engine gave its tokens from first on."""

    tokens: list[int]
    first: int
    logprobs: list[float]
    cached: int


def score(engine: Engine, vocabulary: int, seed: int) -> list[Scored]:
    """Greedy answers to random prompts: scored with their prompts, but for the last, which begins in the cache."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(1000, vocabulary - 1000) for _ in range(length)] for length in PROMPTS]
    scored = [_run(engine, f"{seed}-{i}", prompt, scores_prompt=True) for i, prompt in enumerate(prompts)]
    more = [draw.randrange(1000, vocabulary - 1000) for _ in range(MORE)]
    return [*scored, _run(engine, f"{seed}-more", prompts[-1] + more, scores_prompt=False)]


def compare(model: PreTrainedModel, scored: list[Scored]) -> dict[str, float]:
    """Root mean square and largest difference of log-probabilities: the engine's, and transformers' from itself.

    The latter are of the same tokens with and without PADDING tokens behind them: the same sums in other kernels.
    """
    ours, noise = [], []
    for text in scored:
        given = torch.tensor(text.logprobs, device=model.device)
        expected = _logprobs(model, text, 0)
        ours.append(given - expected)
        noise.append(_logprobs(model, text, PADDING) - expected)
    difference, own = torch.cat(ours), torch.cat(noise)
    return {
        "tokens": difference.numel(),
        "cached_tokens": sum(text.cached for text in scored),
        "rms": float(difference.square().mean().sqrt()),
        "max": float(difference.abs().max()),
        "noise_rms": float(own.square().mean().sqrt()),
        "noise_max": float(own.abs().max()),
    }


def _run(engine: Engine, request_id: str, prompt: list[int], scores_prompt: bool) -> Scored:
    sampling = SamplingParams(
        max_tokens=ANSWER, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0 if scores_prompt else None
    )
    engine.add(GenerateRequest(request_id, prompt, sampling))
    tokens, logprobs, cached = list(prompt), [], 0
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
            cached = max(cached, output.num_cached_tokens)
            tokens += output.new_token_ids
            logprobs += [entry.logprob for entry in [*(output.prompt_logprobs or []), *(output.logprobs or [])]]
    return Scored(tokens, len(tokens) - len(logprobs), logprobs, cached)


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, text: Scored, padding: int) -> torch.Tensor:
    """float32 [tokens from first on]."""
    ids = torch.tensor([text.tokens + text.tokens[:1] * padding], device=model.device)
    rows = slice(text.first - 1, len(text.tokens) - 1)
    logits = model(ids, use_cache=False).logits[0, rows].float()
    chosen = ids[0, text.first : len(text.tokens), None]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    return found
