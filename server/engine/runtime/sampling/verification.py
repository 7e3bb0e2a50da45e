"""Verification of draft tokens: which rows of a step's logits tokens are sampled from, and which draft tokens are accepted.

A sequence's newest token and its draft tokens are computed like a chunk of a prompt, all of whose logits are wanted. At each
place a token is sampled as it would be without draft tokens, with that place's own uniform number; a draft token is accepted
if it is that token. So draft tokens change how many tokens a step yields, and never which.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice, pairwise

from msgspec.structs import replace

from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.sequence import Constraint, Sequence
from server.engine.scheduling.step import Step


class SequenceAhead(Sequence):
    """A sequence as it would be with draft tokens behind its tokens, for sampling what follows them."""

    def __init__(self, sequence: Sequence, draft_tokens: tuple[int, ...], constraint: Constraint | None) -> None:
        """constraint: the grammar's state behind the draft tokens; None: what follows them is not bound."""
        self.__dict__.update(sequence.__dict__)
        self.original = sequence
        self.draft_tokens = draft_tokens
        self.bind(constraint)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, of the answer so far, and draft tokens."""
        return len(self.tokens) + len(self.draft_tokens)


def sampled_sequences(step: Step) -> list[Sequence]:
    """The sequence that each row of a step's logits is sampled for; the draft tokens in front of a row count as tokens.

    Rows behind a draft token that a sequence's grammar does not take, or that completes it, are bound by none: what is
    sampled there is never taken.
    """
    if not step.drafts:
        return step.sampled_sequences
    found: list[Sequence] = []
    for chunk in step.chunks:
        sequence, drafts = chunk.sequence, tuple(chunk.draft_tokens)
        found.append(sequence)
        constraint = sequence.constraint
        for count, token in enumerate(drafts, start=1):
            constraint = None if constraint is None else constraint.ahead(token)
            found.append(SequenceAhead(sequence, drafts[:count], constraint))
    return found


def verified(step: Step, results: list[Sampled]) -> list[Sampled]:
    """The result of each of step.sampled, from those of all rows; the step's chunks get num_accepted."""
    if not step.drafts:
        return results
    rows, chunks, found = iter(results), [], []
    for chunk in step.chunks:
        own = list(islice(rows, chunk.num_sampled))
        count = num_accepted(chunk.draft_tokens, own)
        chunks.append(replace(chunk, num_accepted=count))
        found.append(replace(own[count], accepted=tuple(own[:count])))
    step.chunks = chunks
    return found


def num_accepted(draft_tokens: Items[int], results: list[Sampled]) -> int:
    """Number of draft tokens that are accepted; results: what was sampled in front of each and behind the last one."""
    for count, (token, (result, following)) in enumerate(zip(draft_tokens, pairwise(results), strict=True)):
        # A row whose logits are not numbers is left to the next step, where it comes first and becomes an error.
        if result.error is not None or result.token != token or following.error is not None:
            return count
    return len(draft_tokens)
