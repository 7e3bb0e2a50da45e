"""The draft model: a second, smaller model that guesses the next tokens of the first one's sequences (speculation).

Its keys and values lie in the sequences' own KV blocks, in a cache of its own that has as many: block 7 of a sequence
holds the same tokens for both models. A guess is sampled as the model itself would sample that token, with the same
uniform number, so that two models which agree on a distribution agree on the token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch

from server.engine.runtime.batch import Batch, batch_of
from server.engine.runtime.graphs.decode import DecodeGraphs
from server.engine.runtime.graphs.verify import VerifyGraphs
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.ops import largest_of_rows, sample_by_table
from server.engine.runtime.sampling.random_rows import RandomRows
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.speculation.launched_guesses import LaunchedGuesses
from server.engine.runtime.step_input import StepInput
from server.engine.runtime.trials import first_line
from server.engine.scheduling.sequence import PLACEHOLDER, Sequence
from server.engine.scheduling.step import Step

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    """Tokens of a sequence that the draft model computes: its tokens [start, start + len(ids))."""

    sequence: Sequence
    start: int
    ids: list[int]


@dataclass(frozen=True)
class DraftGraphs:
    """The CUDA graphs that a draft model is replayed from."""

    decode: DecodeGraphs
    verify: VerifyGraphs | None
    """They make the first guess where the draft model has yet to compute tokens in front of the newest one."""


class DraftModel:
    """A prepared model that guesses for another model's sequences, greedy or with their own temperatures and filters.

    It knows neither adapters nor biases: these make its guesses worse, and no answer wrong.
    """

    def __init__(self, paged: PagedModel, vocabulary: int, longest: int, graphs: DraftGraphs | None = None) -> None:
        """vocabulary: the other model's. longest: the most tokens of a sequence that this model is made for."""
        self._paged = paged
        self._graphs = graphs
        self._vocabulary = vocabulary
        self._has_failed = False
        # Whether the last step was a decode graph, behind which the device can lay out the next one.
        self._is_laid_out = False
        self.longest = longest
        """Tokens that it can compute of one sequence."""

    @torch.inference_mode()
    def follow(self, parts: Items[tuple[Sequence, int]]) -> None:
        """Compute that many more known tokens of each sequence, and add them to its num_drafted."""
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
        """Fill the places of step.guesses with guesses; where that fails, step.guesses is emptied.

        On CUDA the guesses are launched only, and step.drafted has them. The sequences' num_drafted says then that all
        their known tokens are computed.
        """
        counts = {
            chunk.sequence: len(step.guesses[chunk.sequence.request_id])
            for chunk in step.chunks
            if chunk.sequence.request_id in step.guesses
        }
        # Sequences with the most guesses come first, so that the others drop out at the end.
        asked = sorted(counts, key=lambda sequence: -counts[sequence])
        try:
            step.drafted = LaunchedGuesses(asked, self._guesses(asked, [counts[sequence] for sequence in asked]))
            if self._graphs is None:
                step.read_guesses()
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception as e:
            self._note_failure(e)
            step.guesses, step.drafted = {}, None
            return
        for sequence in asked:
            sequence.num_drafted = len(sequence.tokens)

    def _note_failure(self, error: Exception) -> None:
        # It may be asked again in every step.
        level = logging.DEBUG if self._has_failed else logging.WARNING
        logger.log(level, "the draft model fails, and has no guesses: %s: %s", type(error).__name__, first_line(error))
        self._has_failed = True

    def _guesses(self, sequences: list[Sequence], counts: list[int]) -> list[torch.Tensor]:
        """Sample counts[i] guesses for sequence i, in LaunchedGuesses' columns; counts must not rise."""
        parts = [_Part(s, s.num_drafted, s.tokens[s.num_drafted :]) for s in sequences]
        columns = [self._next(parts, 0, None)]
        for place in range(1, counts[0]):
            going = sequences[: sum(count > place for count in counts)]
            columns.append(self._following(going, place, columns[-1]))
        if self._paged.vocab_size > self._vocabulary:
            # A token beyond the other model's vocabulary stands for a wrong guess.
            columns = [column.clamp(max=self._vocabulary - 1) for column in columns]
        return columns

    def _following(self, sequences: list[Sequence], place: int, newest: torch.Tensor) -> torch.Tensor:
        """int64 [sequences]: the guess behind place guesses of each; newest: the guesses before, as of _next()."""
        if self._graphs is not None and self._is_laid_out:
            found = self._graphs.decode.run_next(newest[: len(sequences)])
            if found is not None:
                return self._sampled(found, sequences, place)
        return self._next([_Part(s, len(s.tokens) + place - 1, [PLACEHOLDER]) for s in sequences], place, newest)

    def _next(self, parts: list[_Part], place: int, newest: torch.Tensor | None) -> torch.Tensor:
        """int64 [parts]: the token behind each part, the guess behind place guesses of its sequence.

        newest: the guesses before, of these sequences and perhaps of others behind them, which stand for the parts' ids.
        """
        graphs, batch = self._graphs, self._batch(parts)
        own = None if newest is None else newest[: len(parts)]
        self._is_laid_out = graphs is not None and graphs.decode.fits(batch)
        if graphs is not None and self._is_laid_out:
            output = graphs.decode.run(batch, own)
        elif graphs is not None and graphs.verify is not None and batch.num_tokens <= graphs.verify.sizes[-1]:
            output = graphs.verify.run_last(batch, own)
        else:
            batch = batch.to(self._paged.device)
            output = ModelOutput(self._paged.run(batch if own is None else replace(batch, ids=own)))
        return self._sampled(output, [part.sequence for part in parts], place)

    def _sampled(self, output: ModelOutput, sequences: list[Sequence], place: int) -> torch.Tensor:
        """int64 [sequences]: tokens for the place behind place guesses of each; the next replay leaves them as they are."""
        _, tokens = output.greedy or largest_of_rows(output.logits)
        table = RandomRows(sequences, self._paged.vocab_size).table(shift=place)
        return tokens.clone() if table is None else sample_by_table(output.logits, table, tokens)

    def _batch(self, parts: list[_Part]) -> Batch:
        """Make the batch of the parts' tokens; the logits of each part's last one are wanted, in the order of parts."""
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
        return batch_of(given, self._paged.block_size)
