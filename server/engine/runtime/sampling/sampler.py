"""Samples the next token of every sequence from its logits, by its own parameters and its own random numbers."""

from __future__ import annotations

import math

import msgspec
import torch

from server.engine.runtime.sampling.grammar_masks import apply_constraints, refused
from server.engine.runtime.sampling.inverse_cdf import is_filtered, sample_by_inversion
from server.engine.runtime.sampling.penalties import penalties
from server.engine.scheduling.sequence import Sequence
from server.types import TokenLogprob


class Sampled(msgspec.Struct, frozen=True, gc=False):
    """One sequence's next token, or why there is none, or the hidden state that it wanted instead of a token."""

    token: int
    logprob: TokenLogprob | None = None
    error: str | None = None
    embedding: bytes | None = None
    """The hidden state of a sequence that embeds: float32 little-endian."""


def sample(logits: torch.Tensor, sequences: list[Sequence]) -> list[Sampled]:
    """Next tokens from logits [len(sequences), vocabulary], which may be overwritten.

    Order: penalties, logit_bias and the min_tokens ban, (log-probabilities are taken here,) temperature, top_k, top_p,
    min_p. A token is sampled by inverting the cumulative distribution at one uniform number per (seed, position).
    """
    if any(sequence.is_adjusted for sequence in sequences):
        logits = logits.float()
        penalized = [row for row, sequence in enumerate(sequences) if sequence.is_penalized]
        if penalized:
            penalties(logits.shape[1], logits.device).apply(logits, penalized, sequences)
        for row, sequence in enumerate(sequences):
            _adjust(logits[row], sequence)
    best, sampled = _sample_within_grammars(logits, sequences)
    tokens = sampled.tolist()
    usable = torch.isfinite(best).tolist()
    logprobs = _logprobs(logits, sequences, tokens)
    return [
        Sampled(token, logprobs.get(row)) if usable[row] else Sampled(0, error="the model's logits are not numbers")
        for row, token in enumerate(tokens)
    ]


def is_sampled_from_raw_logits(sequence: Sequence) -> bool:
    """Whether the next token is sampled from the model's logits as they are, and nothing else is asked for."""
    # Asked for every sequence of every step.
    plain = sequence.is_plain and sequence.constraint is None
    return plain and len(sequence.tokens) - sequence.num_prompt >= sequence.sampling.min_tokens


def _adjust(logits: torch.Tensor, sequence: Sequence) -> None:
    """Add the bias to one sequence's logits [vocabulary], and ban its ends before min_tokens, in place."""
    sampling, device = sequence.sampling, logits.device
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=device)
        logits[ids] += torch.tensor(list(sampling.logit_bias.values()), dtype=logits.dtype, device=device)
    if sequence.is_too_short and sequence.stop_ids:
        banned = [i for i in sequence.stop_ids if 0 <= i < logits.shape[0]]
        logits[torch.tensor(banned, dtype=torch.int64, device=device)] = -math.inf


def _sample_within_grammars(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of every sequence, and its token: one that its grammar permits, if it has one.

    Finding all permitted tokens takes a thousand times as long as asking about one. So a token is sampled as if there
    were no grammar, and sampled again among the permitted ones if the grammar refuses it. With p the token's probability
    and z that of all permitted tokens, a permitted token still comes up with p + (1 - z) p / z = p / z.
    """
    bound = [row for row, sequence in enumerate(sequences) if sequence.constraint is not None]
    tried = [row for row in bound if _is_tried(sequences[row], logits.shape[1])]
    apply_constraints(logits, [row for row in bound if row not in tried], sequences)
    best, greedy = logits.max(dim=-1)
    tokens = sample_by_inversion(logits, sequences, greedy)
    if tried:
        again = refused(tokens.tolist(), tried, sequences)
        compared = [row for row in tried if row not in again and sequences[row].sampling.logprobs is not None]
        apply_constraints(logits, again + compared, sequences)
        if again:
            rows = torch.tensor(again, device=logits.device)
            best[rows], greedy = logits[rows].max(dim=-1)
            chosen = [sequences[row] for row in again]
            tokens[rows] = sample_by_inversion(logits[rows], chosen, greedy, again=True)
    return best, tokens


def _is_tried(sequence: Sequence, vocabulary: int) -> bool:
    """Whether a token is sampled before the permitted ones are found.

    With a temperature, the choice must not depend on whether a thread has found them already: the token would, too.
    """
    if sequence.sampling.temperature == 0:
        return sequence.constraint is not None and not sequence.constraint.is_known()
    return not is_filtered(sequence, vocabulary)


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
