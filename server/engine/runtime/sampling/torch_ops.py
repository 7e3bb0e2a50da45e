"""The operations of sampling on rows of logits, in torch: those of CPU, with which the kernels on CUDA are compared."""

from __future__ import annotations

import functools
import math

import torch
from torch.nn.functional import embedding

# Filters look at this many of the most likely tokens first; a full sort of the vocabulary is 20 times slower.
_FIRST_CANDIDATES = 1024
# By byte of a mask, what its eight tokens' bits add to their logits. One gather and one sum take a tenth of the time of
# unpacking the bits and masked_fill_, whose branches are mispredicted.
_ADDED = torch.tensor([[0.0 if byte >> bit & 1 else -math.inf for bit in range(8)] for byte in range(256)])


def largest_of_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows], the largest logit of each row, NaN where the row has one; int64 [rows], the first token that has it.

    logits [rows, vocabulary], bfloat16, float16 or float32, contiguous in its last dimension.
    """
    best, tokens = logits.float().max(dim=-1)
    return best, tokens


def penalize_rows(
    logits: torch.Tensor,
    rows: torch.Tensor,
    penalties: torch.Tensor,
    counts: torch.Tensor,
    counted_rows: torch.Tensor,
    newest: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Count a token of each of N sequences and put their penalized logits into out, float32 [N, vocabulary].

    logits [rows, vocabulary], contiguous in its last dimension; rows, int64 [N], those of the sequences; penalties float32
    [N, 3], repetition, presence and frequency penalty; counts and counted_rows as PenaltyTable has them; newest int64 [N],
    the tokens to count, -1 for none.
    """
    known = newest >= 0
    places = counted_rows[known], newest[known]
    counts[places] = (counts[places] + 2) | 1
    out.copy_(logits.index_select(0, rows))
    counted = counts.index_select(0, counted_rows)
    had = counted.nonzero(as_tuple=True)
    times, scores = counted[had] >> 1, out[had]
    repetition, presence, frequency = penalties[had[0]].unbind(1)
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    out[had] = scores - (presence * (times > 0) + frequency * times)


def mask_rows(logits: torch.Tensor, places: torch.Tensor, masks: torch.Tensor) -> None:
    """Set what masks forbid to -inf in rows of logits, float32 [rows, vocabulary], contiguous, in place.

    places: int64 [N], the rows, no row twice; masks: uint8 [N, 4 * ceil(vocabulary / 32)], bit i of byte i // 8 permits
    token i.
    """
    added = embedding(masks.int(), _added(masks.device)).flatten(1)[:, : logits.shape[1]]
    logits.index_add_(0, places, added)


@functools.cache
def _added(device: torch.device) -> torch.Tensor:
    return _ADDED.to(device)


def sample_rows(logits: torch.Tensor, table: torch.Tensor, tokens: torch.Tensor) -> None:
    """Put a token sampled from row i of logits into tokens[i], for each row that table names.

    logits [rows, vocabulary], bfloat16, float16 or float32, contiguous in its last dimension; table float64 [samples, 6]:
    row, temperature, uniform number in [0, 1), top_k, top_p, min_p; tokens int64 [rows]. A token is kept when fewer than
    top_k tokens are likelier, when those have less than top_p of what top_k keeps, and when it has at least min_p of the
    likeliest's probability; equally likely tokens are kept together. The sampled token is the first kept one, by id, at
    which the running sum of the kept ones' probabilities passes uniform * their sum.
    """
    filtered = (table[:, 3] < logits.shape[1]) | (table[:, 4] < 1) | (table[:, 5] > 0)
    for chosen, pick in ((table[~filtered], _pick), (table[filtered], _pick_filtered)):
        if len(chosen):
            rows = chosen[:, 0].long()
            scores = (logits if len(rows) == logits.shape[0] else logits[rows]).float()
            # The maximum is subtracted before the division, so that a tiny temperature does not overflow.
            scores = (scores - scores.amax(dim=-1, keepdim=True)) / chosen[:, 1:2].float()
            tokens.index_copy_(0, rows, pick(scores, chosen))


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Index, in each row of weights, where the running sum passes uniform * total."""
    # float64: over a large vocabulary a float32 running sum loses the unlikely tokens.
    running = weights.double().cumsum(-1)
    index = torch.searchsorted(running, uniforms * running[:, -1:], right=True)
    return index.squeeze(1).clamp_(max=weights.shape[1] - 1)


def _pick(scores: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return _invert(scores.softmax(-1), table[:, 2:3])


def _pick_filtered(scores: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    vocabulary, uniforms = scores.shape[1], table[:, 2:3]
    total = scores.exp().sum(-1, keepdim=True)
    best, ids = scores.topk(min(_FIRST_CANDIDATES, vocabulary), dim=-1)
    lowest, decided = _lowest_kept(best, vocabulary, total, table)
    # The running sum goes in the order of token ids, as it does over the whole vocabulary.
    ids, order = ids.sort(dim=-1)
    best = best.gather(1, order)
    places = _invert(best.exp().masked_fill(best < lowest, 0.0), uniforms)
    tokens = ids.gather(1, places.unsqueeze(1)).squeeze(1)
    if not decided.all():
        scores, total, table = scores[~decided], total[~decided], table[~decided]
        lowest, _ = _lowest_kept(scores.sort(dim=-1, descending=True)[0], vocabulary, total, table)
        tokens[~decided] = _invert(scores.exp().masked_fill(scores < lowest, 0.0), uniforms[~decided])
    return tokens


def _lowest_kept(
    best: torch.Tensor, vocabulary: int, total: torch.Tensor, table: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest score [rows, 1] that passes the filters, and whether all tokens that do are among the best.

    best: the highest scores, descending. Tokens with the same score pass together.
    """
    top_k, top_p, min_p = table[:, 3:4].long(), table[:, 4:5].float(), table[:, 5:6].float()
    candidates = best.shape[1]
    place = torch.arange(candidates, device=best.device)
    weights = best.exp().masked_fill(place >= top_k, 0.0)
    # top_p is a share of the mass that top_k leaves, which is known without a sort when top_k is off.
    mass = torch.where(top_k < vocabulary, weights.sum(-1, keepdim=True), total)
    before = weights.double().cumsum(-1) - weights
    kept = (before < top_p * mass) | (place == 0)
    kept &= (weights >= min_p * weights[:, :1]) & (place < top_k)
    # None is kept of logits that are not numbers, which becomes an error of their sequence.
    lowest = best.gather(1, (kept.sum(-1, keepdim=True) - 1).clamp_(min=0))
    return lowest, (best[:, -1:] < lowest).squeeze(1) | (candidates == vocabulary)
