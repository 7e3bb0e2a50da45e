"""The next token of every sequence from its logits, each by its own parameters and its own random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from server.engine.runtime.masks import apply_constraint
from server.engine.scheduling.sequence import Sequence
from server.types import TokenLogprob

_MASK64 = (1 << 64) - 1
# Filters look at this many of the most likely tokens first; a full sort of the vocabulary is 20 times slower.
_FIRST_CANDIDATES = 1024


@dataclass(frozen=True)
class Sampled:
    """One sequence's next token, or why there is none."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on seed and position only (splitmix64 of their mixture, 53 bits)."""
    state = (seed * 0xD1342543DE82EF95 + position * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & _MASK64
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return (state >> 11) / 2**53


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Next tokens from logits [len(sequences), vocabulary], which may be overwritten.

    Order: logit_bias and the min_tokens ban, penalties, (log-probabilities are taken here,) temperature, top_k, top_p,
    min_p. The draw is by inverse distribution from one uniform number per (seed, position).
    """
    for row, sequence in enumerate(sequences):
        if _is_adjusted(sequence):
            logits = logits.float()
            _adjust(logits[row], sequence)
    best, tokens_best = logits.max(dim=-1)
    tokens = tokens_best.tolist()
    usable = torch.isfinite(best).tolist()
    drawn = [i for i, s in enumerate(sequences) if s.sampling.temperature > 0 and usable[i]]
    if drawn:
        for row, token in zip(drawn, _draw(logits, sequences, drawn), strict=True):
            tokens[row] = token
    logprobs = _logprobs(logits, sequences, tokens)
    return [
        Sampled(token, logprobs.get(row)) if usable[row] else Sampled(0, error="the model's logits are not numbers")
        for row, token in enumerate(tokens)
    ]


def is_greedy(sequence: Sequence) -> bool:
    """Whether the sequence's next token is the best of the model's own logits and nothing else is asked for."""
    sampling = sequence.sampling
    return sampling.temperature == 0 and sampling.logprobs is None and not _is_adjusted(sequence)


def _is_adjusted(sequence: Sequence) -> bool:
    sampling = sequence.sampling
    return (
        bool(sampling.logit_bias)
        or sequence.generated_counts is not None
        or sequence.seen is not None
        or sequence.num_generated < sampling.min_tokens
        or sequence.constraint is not None
    )


def _adjust(logits: torch.Tensor, sequence: Sequence) -> None:
    """Bias, ban and penalize one sequence's logits [vocabulary] in place."""
    sampling, device = sequence.sampling, logits.device
    if sequence.seen is not None:
        seen = torch.tensor(list(sequence.seen), device=device)
        scores, penalty = logits[seen], sampling.repetition_penalty
        logits[seen] = torch.where(scores < 0, scores * penalty, scores / penalty)
    if sequence.generated_counts:
        ids = torch.tensor(list(sequence.generated_counts), device=device)
        counts = torch.tensor(list(sequence.generated_counts.values()), dtype=logits.dtype, device=device)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=device)
        logits[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=device)
    if sequence.num_generated < sampling.min_tokens and sequence.stop_ids:
        banned = [i for i in sequence.stop_ids if 0 <= i < logits.shape[0]]
        logits[torch.tensor(banned, dtype=torch.int64, device=device)] = -math.inf
    if sequence.constraint is not None:
        ends = sequence.stop_ids if sequence.num_generated >= sampling.min_tokens else ()
        apply_constraint(logits, sequence.constraint, ends)


def _draw(logits: torch.Tensor, sequences: list[Sequence], rows: list[int]) -> list[int]:
    """Drawn tokens for rows, whose temperatures are above 0."""
    device = logits.device
    chosen = [sequences[row] for row in rows]
    temperatures = torch.tensor([s.sampling.temperature for s in chosen], device=device).unsqueeze(1)
    uniforms = torch.tensor(
        [uniform(s.seed, len(s.tokens)) for s in chosen], dtype=torch.float64, device=device
    ).unsqueeze(1)
    scores = (logits if len(rows) == logits.shape[0] else logits[rows]).float()
    # Less the maximum before dividing, so that a tiny temperature does not overflow.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures
    filtered = [i for i, s in enumerate(chosen) if _is_filtered(s, logits.shape[1])]
    plain = [i for i in range(len(chosen)) if i not in set(filtered)]
    tokens = torch.empty(len(chosen), dtype=torch.int64, device=device)
    if plain:
        tokens[plain] = _invert(scores[plain].softmax(-1), uniforms[plain])
    if filtered:
        tokens[filtered] = _draw_filtered(scores[filtered], [chosen[i] for i in filtered], uniforms[filtered])
    return [int(token) for token in tokens.tolist()]


def _is_filtered(sequence: Sequence, vocabulary: int) -> bool:
    sampling = sequence.sampling
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index, in each row of weights, where the running sum passes uniform * total."""
    # float64: over a large vocabulary a float32 running sum loses the unlikely tokens.
    running = weights.double().cumsum(-1)
    index = torch.searchsorted(running, uniforms * running[:, -1:], right=True)
    return index.squeeze(1).clamp_(max=weights.shape[1] - 1)


def _draw_filtered(scores: torch.Tensor, sequences: list[Sequence], uniforms: torch.Tensor) -> torch.Tensor:
    vocabulary = scores.shape[1]
    top_k = [s.sampling.top_k if 0 < s.sampling.top_k < vocabulary else vocabulary for s in sequences]
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=scores.device)
    total = scores.exp().sum(-1, keepdim=True)
    pending = list(range(len(sequences)))
    for candidates in (min(_FIRST_CANDIDATES, vocabulary), vocabulary):
        # A row is decided here when the first token cut off is among its candidates, or all tokens are.
        best, ids = scores[pending].topk(candidates, dim=-1)
        weights = best.exp()
        limits = torch.tensor([[top_k[i]] for i in pending], device=scores.device)
        place = torch.arange(candidates, device=scores.device)
        weights = weights.masked_fill(place >= limits, 0.0)
        # The mass that top_p is a share of: what top_k leaves, known without a sort when top_k is off.
        mass = torch.where(limits < vocabulary, weights.sum(-1, keepdim=True), total[pending])
        before = weights.double().cumsum(-1) - weights
        share = torch.tensor([[sequences[i].sampling.top_p] for i in pending], device=scores.device)
        ratio = torch.tensor([[sequences[i].sampling.min_p] for i in pending], device=scores.device)
        kept = ((before < share * mass) | (place == 0)) & (weights >= ratio * weights[:, :1]) & (place < limits)
        known = (limits <= candidates) | (limits == vocabulary)
        decided = [candidates == vocabulary or d for d in (known[:, 0] & ~kept[:, -1]).tolist()]
        picked = ids.gather(1, _invert(weights * kept, uniforms[pending]).unsqueeze(1)).squeeze(1)
        for i, row in enumerate(pending):
            if decided[i]:
                tokens[row] = picked[i]
        pending = [row for i, row in enumerate(pending) if not decided[i]]
        if not pending:
            break
    return tokens


def _logprobs(logits: torch.Tensor, sequences: list[Sequence], tokens: list[int]) -> dict[int, TokenLogprob]:
    """Log-probabilities of the rows whose requests want them."""
    rows = [i for i, s in enumerate(sequences) if s.sampling.logprobs is not None]
    if not rows:
        return {}
    values = logits[rows].float().log_softmax(-1)
    chosen = values.gather(1, torch.tensor([[tokens[i]] for i in rows], device=logits.device)).squeeze(1).tolist()
    most = max(sequences[i].sampling.logprobs or 0 for i in rows)
    top_values, top_ids = (t.tolist() for t in values.topk(most, dim=-1))
    return {
        row: TokenLogprob(
            tokens[row],
            chosen[i],
            list(zip(top_ids[i], top_values[i], strict=True))[: sequences[row].sampling.logprobs or 0],
        )
        for i, row in enumerate(rows)
    }
