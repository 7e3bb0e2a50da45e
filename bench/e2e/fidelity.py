"""Compare the engine's log-probabilities with those of transformers' own forward pass on the same weights."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import PreTrainedModel

import nf4_kernels.reference
from server.engine.core import Engine
from server.types import GenerateRequest, SamplingParams

# Lengths of the prompts: less than one KV block, more than one, more than a sliding window of 1024 tokens.
PROMPTS = (7, 300, 1500)
ANSWER = 24
# Tokens that continue the longest prompt, most of which is in the prefix cache by then.
MORE = 40


@dataclass(frozen=True)
class Scored:
    """A text and the log-probabilities that the engine gave its tokens from first on."""

    tokens: list[int]
    first: int
    logprobs: list[float]
    cached: int


def score(engine: Engine, vocabulary: int, seed: int) -> list[Scored]:
    """Greedy answers to random prompts, scored together with their prompts, and one that begins in the prefix cache."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(1000, vocabulary - 1000) for _ in range(length)] for length in PROMPTS]
    scored = [_run(engine, f"{seed}-{i}", prompt, scores_prompt=True) for i, prompt in enumerate(prompts)]
    more = [rng.randrange(1000, vocabulary - 1000) for _ in range(MORE)]
    # A prompt that is scored stays out of the prefix cache.
    scored.append(_run(engine, f"{seed}-again", prompts[-1], scores_prompt=False))
    return [*scored, _run(engine, f"{seed}-more", prompts[-1] + more, scores_prompt=False)]


def compare(model: PreTrainedModel, scored: list[Scored]) -> dict[str, float]:
    """Errors of the log-probabilities, root mean square and largest: the engine's and those of model, as it is.

    The reference is the same model with its NF4 weights dequantized to float32 and everything else in float32. model is
    converted to that and stays so.
    """
    theirs = torch.cat([_logprobs(model, text) for text in scored])
    make_exact(model)
    exact = torch.cat([_logprobs(model, text) for text in scored])
    ours = torch.tensor([value for text in scored for value in text.logprobs], device=exact.device)
    errors = {"ours": ours - exact, "hf": theirs - exact}
    return {
        "tokens": exact.numel(),
        "cached_tokens": sum(text.cached for text in scored),
        **{f"{name}_rms": float(error.square().mean().sqrt()) for name, error in errors.items()},
        **{f"{name}_max": float(error.abs().max()) for name, error in errors.items()},
    }


def make_exact(model: PreTrainedModel) -> None:
    """Computes in float32 from now on, with the NF4 weights that the model has, each dequantized at every call.

    On a CPU the model must not have computed before: bitsandbytes then puts a weight's codes into another order.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear4bit):
                setattr(parent, name, _Exact(child))
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()


class _Exact(nn.Module):
    """A Linear4bit layer in float32, which dequantizes its weight at every call."""

    def __init__(self, layer: Linear4bit) -> None:
        super().__init__()
        # The tuple keeps the layer from being a child module, whose scales the model's conversion would change.
        self._hidden = (layer,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x float32 [..., k] to [..., n]."""
        (layer,) = self._hidden
        bias = layer.bias
        packed = nf4_kernels.Weight.from_quant_state(layer.weight, layer.weight.quant_state)
        weight = nf4_kernels.reference.dequantize(packed, torch.float32)
        return nn.functional.linear(x, weight, None if bias is None else bias.float())


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
def _logprobs(model: PreTrainedModel, text: Scored) -> torch.Tensor:
    """float32 [tokens from first on]."""
    ids = torch.tensor([text.tokens], device=model.device)
    rows = slice(text.first - 1, len(text.tokens) - 1)
    logits = model(ids, use_cache=False).logits[0, rows].float()
    chosen = ids[0, text.first :, None]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, chosen)[:, 0]
    return found
