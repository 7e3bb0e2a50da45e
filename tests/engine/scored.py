"""The answers of an engine next to transformers' own forward in float32: tokens, and their log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from server.types import RequestOutput


def check_scored(
    model: Any, prompt: Sequence[int], tokens: Sequence[int], logprobs: Sequence[float], tolerance: float
) -> None:
    """Every token is the likeliest after those in front of it, but for near ties, and has the model's log-probability.

    tolerance: of log-probabilities, which kernels round.
    """
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    chosen = torch.tensor(tokens)[:, None]
    behind = logits.amax(-1) - logits.gather(-1, chosen)[:, 0]
    assert (behind <= 2 * tolerance).all(), (tokens, behind.tolist())
    expected = logits.log_softmax(-1).gather(-1, chosen)[:, 0]
    torch.testing.assert_close(torch.tensor(logprobs), expected, atol=tolerance, rtol=0.0)


def check_outputs(model: Any, prompt: Sequence[int], outputs: Sequence[RequestOutput], tolerance: float) -> None:
    """check_scored() of all outputs of a greedy request with logprobs."""
    assert outputs[-1].error is None, outputs[-1].error
    entries = [entry.logprob for output in outputs for entry in output.logprobs or ()]
    check_scored(model, prompt, [token for output in outputs for token in output.new_token_ids], entries, tolerance)
