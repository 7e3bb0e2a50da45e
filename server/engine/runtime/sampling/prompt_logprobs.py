"""Log-probabilities of a prompt's own tokens, taken while it is prefilled."""

from __future__ import annotations

import torch

from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step
from server.types import TokenLogprob

# Rows of logits that are normalized at once.
_ROWS = 64


def score_prompts(step: Step, logits: torch.Tensor) -> None:
    """Note the log-probabilities of prompt tokens in their sequences.

    logits float [rows, vocabulary]: for every chunk in the step's order, those at its scored positions.
    """
    row = 0
    for chunk in step.chunks:
        positions = chunk.scored
        for start in range(0, len(positions), _ROWS):
            part = positions[start : start + _ROWS]
            _score(chunk.sequence, part, logits[row : row + len(part)])
            row += len(part)


def _score(sequence: Sequence, positions: range, logits: torch.Tensor) -> None:
    max_logprobs = sequence.sampling.prompt_logprobs or 0
    values = logits.float().log_softmax(-1)
    targets = sequence.tokens[positions.start + 1 : positions.stop + 1]
    chosen = values.gather(1, torch.tensor(targets, device=values.device).unsqueeze(1))
    ranks = ((values > chosen).sum(-1) + 1).tolist()
    own = chosen.squeeze(1).tolist()
    top = values.topk(max_logprobs, dim=-1)
    top_values, top_ids = top.values.tolist(), top.indices.tolist()
    for i, position in enumerate(positions):
        alternatives = list(zip(top_ids[i], top_values[i], strict=True))
        sequence.prompt_scores[position + 1] = TokenLogprob(targets[i], own[i], alternatives, ranks[i])
