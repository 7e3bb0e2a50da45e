"""The draft model: a second, smaller model that guesses the next tokens of the first one's sequences (speculation).

Its keys and values lie in the sequences' own KV blocks, in a cache of its own that has as many: block 7 of a sequence
holds the same tokens for both models. A guess is sampled as the model itself would sample that token, with the same
uniform number, so that two models which agree on a distribution agree on the token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass

import numpy as np
import torch

from server.engine.runtime.batch import Batch, StepInput, batch_of
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.inverse_cdf import sample_by_inversion
from server.engine.runtime.trials import first_line
from server.engine.runtime.verification import SequenceAhead
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """Tokens of a sequence that the draft model computes: its tokens [start, start + len(ids))."""

    sequence: Sequence
    start: int
    ids: list[int]


class DraftModel:
    """A prepared model that guesses for another model's sequences, greedy or with their own temperatures and filters.

    It knows neither adapters nor biases: these make its guesses worse, and no answer wrong.
    """

    def __init__(self, paged: PagedModel, vocabulary: int, longest: int) -> None:
        """vocabulary: the other model's. longest: tokens of a sequence that this one is made for."""
        self._paged = paged
        self._vocabulary = vocabulary
        self._has_failed = False
        self.longest = longest
        """Tokens that it can compute of one sequence."""

    @torch.inference_mode()
    def follow(self, parts: Items[tuple[Sequence, int]]) -> None:
        """Compute that many more known tokens of each sequence, which their num_drafted says then."""
        chosen = [_Part(s, s.num_drafted, s.tokens[s.num_drafted : s.num_drafted + count]) for s, count in parts]
        try:
            self._paged.hidden_states(self._batch(chosen))
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception as e:
            self._note_failure(e)
            return
        for part in chosen:
            part.sequence.num_drafted = part.start + len(part.ids)

    @torch.inference_mode()
    def guess(self, step: Step) -> None:
        """Put guesses in the places that step.guesses has for them, or empty it where that fails.

        The sequences' num_drafted says then that all their known tokens are computed.
        """
        counts = {
            chunk.sequence: len(step.guesses[chunk.sequence.request_id])
            for chunk in step.chunks
            if chunk.sequence.request_id in step.guesses
        }
        # Those with the most guesses first, so that the others drop out at the end.
        asked = sorted(counts, key=lambda sequence: -counts[sequence])
        try:
            found = self._guesses(asked, [counts[sequence] for sequence in asked])
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception as e:
            self._note_failure(e)
            step.guesses = {}
            return
        for sequence, tokens in zip(asked, found, strict=True):
            sequence.num_drafted = len(sequence.tokens)
            step.guesses[sequence.request_id] = tokens

    def _note_failure(self, error: Exception) -> None:
        # It may be asked again in every step.
        level = logging.DEBUG if self._has_failed else logging.WARNING
        logger.log(level, "the draft model fails, and has no guesses: %s: %s", type(error).__name__, first_line(error))
        self._has_failed = True

    def _guesses(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        """That many guesses for each sequence; counts do not rise."""
        parts = [_Part(s, s.num_drafted, s.tokens[s.num_drafted :]) for s in sequences]
        found: list[list[int]] = [[] for _ in sequences]
        for place in range(counts[0]):
            tokens = self._sampled(self._paged.run(self._batch(parts)), [part.sequence for part in parts], place)
            for own, token in zip(found, tokens.tolist(), strict=False):
                own.append(token)
            going = sum(count > place + 1 for count in counts)
            parts = [
                _Part(s, len(s.tokens) + place, own[-1:])
                for s, own in zip(sequences[:going], found[:going], strict=True)
            ]
        return found

    def _sampled(self, logits: torch.Tensor, sequences: list[Sequence], place: int) -> torch.Tensor:
        """int64 [sequences]: the guess behind place guesses of each sequence, from logits [sequences, vocabulary]."""
        logits = logits[:, : self._vocabulary]
        ahead: list[Sequence] = [SequenceAhead(sequence, place) for sequence in sequences]
        return sample_by_inversion(logits, ahead, logits.argmax(dim=-1))

    def _batch(self, parts: list[_Part]) -> Batch:
        """What computes some tokens, of which the last of each part is wanted, in the order of parts."""
        order = sorted(range(len(parts)), key=lambda index: len(parts[index].ids) > 1)
        ordered = [parts[index] for index in order]
        lengths = np.array([len(part.ids) for part in ordered], np.int64)
        last = np.empty(len(parts), np.int64)
        last[order] = lengths.cumsum() - 1
        tables = parts[0].sequence.tables
        assert tables is not None
        # Where the other model's vocabulary is larger, the tokens beyond are padding that no text has.
        highest = self._paged.vocab_size - 1
        given = StepInput(
            tables,
            np.array([part.sequence.row for part in ordered], np.int64),
            np.array([part.start for part in ordered], np.int64),
            lengths,
            [min(token, highest) for part in ordered for token in part.ids],
            last,
            [None] * len(parts),
        )
        return batch_of(given, self._paged.block_size, self._paged.device)
