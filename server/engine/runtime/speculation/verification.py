"""Steps that check guesses: the rows of their logits, and which guesses are accepted.

A sequence's known token and its guesses are computed like a chunk of a prompt, all of whose logits are wanted. At each
place a token is sampled as it would be without guesses, with that place's own uniform number; a guess is accepted if it is
that token. So guesses change how many tokens a step yields, and never which.
"""

from __future__ import annotations

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
    """The sequence that each row of a step's logits is sampled for; the guesses in front of a row count as tokens.

    Rows behind a guess that a sequence's grammar does not take, or that completes it, are bound by none: what is sampled
    there is never taken.
    """
    if not step.guesses:
        return step.sampled_sequences
    found: list[Sequence] = []
    for chunk in step.chunks:
        sequence = chunk.sequence
        found.append(sequence)
        constraint, guesses = sequence.constraint, tuple(step.guesses.get(sequence.request_id, ()))
        for more, guess in enumerate(guesses, start=1):
            constraint = None if constraint is None else constraint.ahead(guess)
            found.append(SequenceAhead(sequence, guesses[:more], constraint))
    return found


def accepted(step: Step, results: list[Sampled]) -> tuple[list[Sampled], dict[str, list[Sampled]]]:
    """The results of a step with guesses, one a row: each chunk's first, and by request id those that follow it.

    A sequence with guesses has as many that follow as guesses were accepted, because the last of them is new.
    """
    firsts: list[Sampled] = []
    others: dict[str, list[Sampled]] = {}
    row = 0
    for chunk in step.chunks:
        guesses = step.guesses.get(chunk.sequence.request_id, [])
        own = results[row : row + 1 + len(guesses)]
        row += len(own)
        right = 0
        for guess, result, following in zip(guesses, own, own[1:], strict=False):
            # A row whose logits are not numbers is left to the next step, where it comes first and becomes an error.
            if result.error is not None or result.token != guess or following.error is not None:
                break
            right += 1
        firsts.append(own[0])
        if guesses:
            others[chunk.sequence.request_id] = own[1 : 1 + right]
    return firsts, others
