"""One launch that finds which guesses of a step were right, where the host does not know its tokens."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

MOST_SEQUENCES = 64


def accept(
    ids: torch.Tensor, sampled: torch.Tensor, firsts: torch.Tensor, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many guesses of S sequences were right, and their last two tokens then; both int64 [2 S].

    Elements 2 i and 2 i + 1 are of sequence i: its number of right guesses, twice; and its last token but one and its newest
    one. S is at most MOST_SEQUENCES. ids int64 [T]: a step's known tokens, each followed by its guesses; sampled int64 [T]:
    the tokens behind these. firsts int64 [2, S]: the row of each sequence's known token, and how many guesses follow it,
    `most` at most.
    """
    count = firsts.shape[1]
    shifts, tokens = (torch.empty(2 * count, dtype=torch.int64, device=ids.device) for _ in range(2))
    _accept[(1,)](ids, sampled, firsts, shifts, tokens, count, most, MOST_SEQUENCES)
    return shifts, tokens


# Compiled once, not anew for numbers of 1 or multiples of 16: steps would wait for it.
@triton.jit(do_not_specialize=["count", "most"])  # type: ignore[untyped-decorator]
def _accept(ids, sampled, firsts, shifts, tokens, count, most, lanes: tl.constexpr):  # type: ignore[no-untyped-def]
    lane = tl.arange(0, lanes)
    real = lane < count
    first = tl.load(firsts + lane, mask=real, other=0)
    guesses = tl.load(firsts + count + lane, mask=real, other=0)
    right = tl.zeros([lanes], tl.int64)
    going = real
    for place in range(most):
        going = going & (place < guesses)
        guess = tl.load(ids + first + place + 1, mask=going, other=0)
        found = tl.load(sampled + first + place, mask=going, other=0)
        going = going & (guess == found)
        right += going.to(tl.int64)
    for each in tl.static_range(2):
        tl.store(shifts + 2 * lane + each, right, mask=real)
    before = tl.load(ids + first + right, mask=real, other=0)
    newest = tl.load(sampled + first + right, mask=real, other=0)
    tl.store(tokens + 2 * lane, before, mask=real)
    tl.store(tokens + 2 * lane + 1, newest, mask=real)
