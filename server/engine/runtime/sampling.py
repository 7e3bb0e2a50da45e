"""The next token of every sequence from its logits, each by its own parameters and its own random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from server.engine.runtime.masks import apply_constraints, refused
from server.engine.scheduling.sequence import Sequence
from server.types import TokenLogprob

_MASK64 = (1 << 64) - 1
# Filters look at this many of the most likely tokens first; a full sort of the vocabulary is 20 times slower.
_FIRST_CANDIDATES = 1024
# No sequence is as long: positions from here on give second draws their numbers.
_SECOND_DRAWS = 1 << 40


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
    best, drawn = _keep_to_grammars(logits, sequences)
    tokens = drawn.tolist()
    usable = torch.isfinite(best).tolist()
    logprobs = _logprobs(logits, sequences, tokens)
    return [
        Sampled(token, logprobs.get(row)) if usable[row] else Sampled(0, error="the model's logits are not numbers")
        for row, token in enumerate(tokens)
    ]


def is_drawn_from_own_logits(sequence: Sequence) -> bool:
    """Whether the sequence's next token is the best of the model's own logits or drawn from them, and only that."""
    return sequence.sampling.logprobs is None and not _is_adjusted(sequence)


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


def _keep_to_grammars(logits: torch.Tensor, sequences: list[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of every sequence, and its token: one that its grammar permits, if it has one.

    To find all permitted tokens takes a thousand times as long as to ask about one. So a token is drawn as if there
    were no grammar, and drawn again among the permitted ones if it is not one of them. A permitted token comes with its
    share of the permitted ones' probability all the same: p + (1 - z) p / z = p / z.
    """
    bound = [row for row, sequence in enumerate(sequences) if sequence.constraint is not None]
    tried = [row for row in bound if _is_tried(sequences[row], logits.shape[1])]
    apply_constraints(logits, [row for row in bound if row not in tried], sequences)
    best, greedy = logits.max(dim=-1)
    tokens = draw(logits, sequences, greedy)
    if tried:
        again = refused(tokens.tolist(), tried, sequences)
        compared = [row for row in tried if row not in again and sequences[row].sampling.logprobs is not None]
        apply_constraints(logits, again + compared, sequences)
        if again:
            rows = torch.tensor(again, device=logits.device)
            best[rows], greedy = logits[rows].max(dim=-1)
            tokens[rows] = draw(logits[rows], [sequences[row] for row in again], greedy, second=True)
    return best, tokens


def _is_tried(sequence: Sequence, vocabulary: int) -> bool:
    """Whether a token is drawn before the permitted ones are found. A draw must not depend on what is known when."""
    if sequence.sampling.temperature == 0:
        return sequence.constraint is not None and not sequence.constraint.is_known()
    return not _is_filtered(sequence, vocabulary)


def draw(logits: torch.Tensor, sequences: list[Sequence], tokens: torch.Tensor, second: bool = False) -> torch.Tensor:
    """tokens, int64 [len(sequences)], with a drawn one in each row whose temperature is above 0.

    logits [len(sequences), vocabulary], all on one device; on CUDA the host does not wait for it. A second draw for the
    same places has random numbers of its own.
    """
    vocabulary = logits.shape[1]
    drawn = [row for row, s in enumerate(sequences) if s.sampling.temperature > 0]
    filtered = [row for row in drawn if _is_filtered(sequences[row], vocabulary)]
    plain = [row for row in drawn if not _is_filtered(sequences[row], vocabulary)]
    for rows, pick in ((plain, _pick), (filtered, _pick_filtered)):
        if rows:
            numbers = _Numbers.of([sequences[row] for row in rows], rows, vocabulary, logits.device, second)
            scores = (logits if len(rows) == logits.shape[0] else logits[numbers.rows]).float()
            # Less the maximum before dividing, so that a tiny temperature does not overflow.
            scores = (scores - scores.amax(dim=-1, keepdim=True)) / numbers.temperatures
            tokens = tokens.index_copy(0, numbers.rows, pick(scores, numbers))
    return tokens


@dataclass(frozen=True)
class _Numbers:
    """What the draws of some rows need, on their device: one transfer for everything. All but rows are [rows, 1]."""

    rows: torch.Tensor
    temperatures: torch.Tensor
    uniforms: torch.Tensor
    """float64."""
    top_k: torch.Tensor
    """The vocabulary's size where it is off."""
    top_p: torch.Tensor
    min_p: torch.Tensor

    def only(self, mask: torch.Tensor) -> _Numbers:
        """Those of the rows that mask, bool [rows], picks."""
        return _Numbers(*(getattr(self, f.name)[mask] for f in fields(self)))

    @classmethod
    def of(
        cls, chosen: list[Sequence], rows: list[int], vocabulary: int, device: torch.device, second: bool
    ) -> _Numbers:
        shift = _SECOND_DRAWS if second else 0
        table = torch.tensor(
            [
                [
                    row,
                    s.sampling.temperature,
                    uniform(s.seed, len(s.tokens) + shift),
                    s.sampling.top_k if 0 < s.sampling.top_k < vocabulary else vocabulary,
                    s.sampling.top_p,
                    s.sampling.min_p,
                ]
                for row, s in zip(rows, chosen, strict=True)
            ],
            dtype=torch.float64,
            pin_memory=device.type == "cuda",
        ).to(device, non_blocking=True)
        places, temperatures, uniforms, top_k, top_p, min_p = table.unsqueeze(2).unbind(1)
        return cls(
            places.squeeze(1).long(), temperatures.float(), uniforms, top_k.long(), top_p.float(), min_p.float()
        )  # fmt: skip


def _is_filtered(sequence: Sequence, vocabulary: int) -> bool:
    sampling = sequence.sampling
    return 0 < sampling.top_k < vocabulary or sampling.top_p < 1 or sampling.min_p > 0


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index, in each row of weights, where the running sum passes uniform * total."""
    # float64: over a large vocabulary a float32 running sum loses the unlikely tokens.
    running = weights.double().cumsum(-1)
    index = torch.searchsorted(running, uniforms * running[:, -1:], right=True)
    return index.squeeze(1).clamp_(max=weights.shape[1] - 1)


def _pick(scores: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    return _invert(scores.softmax(-1), numbers.uniforms)


def _pick_filtered(scores: torch.Tensor, numbers: _Numbers) -> torch.Tensor:
    vocabulary = scores.shape[1]
    total = scores.exp().sum(-1, keepdim=True)
    if scores.is_cuda:
        # Whether the first candidates are enough could only be asked by waiting for the device.
        return _pick_among(vocabulary, scores, total, numbers)[0]
    tokens, decided = _pick_among(min(_FIRST_CANDIDATES, vocabulary), scores, total, numbers)
    if not decided.all():
        others = _pick_among(vocabulary, scores[~decided], total[~decided], numbers.only(~decided))[0]
        tokens[~decided] = others
    return tokens


def _pick_among(
    candidates: int, scores: torch.Tensor, total: torch.Tensor, numbers: _Numbers
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens drawn from the most likely candidates that pass the filters, and whether no other token could pass."""
    vocabulary = scores.shape[1]
    if candidates < vocabulary:
        best, ids = scores.topk(candidates, dim=-1)
    else:
        best, ids = scores.sort(dim=-1, descending=True)
    place = torch.arange(candidates, device=scores.device)
    weights = best.exp().masked_fill(place >= numbers.top_k, 0.0)
    limited = numbers.top_k < vocabulary
    # The mass that top_p is a share of: what top_k leaves, known without a sort when top_k is off.
    mass = torch.where(limited, weights.sum(-1, keepdim=True), total)
    before = weights.double().cumsum(-1) - weights
    kept = (before < numbers.top_p * mass) | (place == 0)
    kept &= (weights >= numbers.min_p * weights[:, :1]) & (place < numbers.top_k)
    # Decided when the first token cut off is among the candidates, or all tokens are.
    known = (numbers.top_k <= candidates) | ~limited
    decided = (known[:, 0] & ~kept[:, -1]) | (candidates == vocabulary)
    return ids.gather(1, _invert(weights * kept, numbers.uniforms).unsqueeze(1)).squeeze(1), decided


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
