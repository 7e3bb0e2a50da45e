"""The draft model: a second, smaller model that proposes the next tokens of the first one's sequences (speculation).

Its keys and values lie in the sequences' own KV blocks, in a cache of its own that has as many: block 7 of a sequence
holds the same tokens for both models. A draft token is sampled as the model itself would sample it, with the same
uniform number, so that two models which agree on a distribution agree on the token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace

import numpy as np
import torch

from server.engine.runtime.batch import Batch, batch_of, to_device
from server.engine.runtime.graphs.graph_set import GraphSet
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.sampling.ops import largest_of_rows, sample_by_table
from server.engine.runtime.sampling.random_rows import RandomRows
from server.engine.runtime.sampling.sampler import ModelOutput
from server.engine.runtime.speculation.launched_drafts import LaunchedDrafts
from server.engine.runtime.step_input import StepInput
from server.engine.runtime.trials import first_line
from server.engine.scheduling.sequence import PLACEHOLDER, Sequence

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

    decode: GraphSet
    verify: GraphSet | None
    """They find the first draft token where the draft model has yet to compute tokens in front of the newest one."""


class DraftModel:
    """A prepared model that proposes tokens for another one's sequences, greedy or with their temperatures and filters.

    It knows neither adapters nor biases: these make its draft tokens worse, and no answer wrong.
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
    def follow(self, parts: Items[tuple[Sequence, int, int]]) -> bool:
        """Compute tokens [start, end) of sequences, all of them known; False if that fails."""
        try:
            self._paged.hidden_states(self._batch([_Part(s, start, s.tokens[start:end]) for s, start, end in parts]))
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception as e:
            self._note_failure(e)
            return False
        return True

    @torch.inference_mode()
    def propose(self, asked: Items[tuple[Sequence, int, int]]) -> LaunchedDrafts | None:
        """Sample draft tokens of sequences, all of whose tokens are known, without waiting for them; None if that fails.

        asked: sequences, how many tokens of each this model has computed, and how many draft tokens are wanted.
        """
        # Sequences with the most draft tokens come first, so that the others drop out at the end.
        asked = sorted(asked, key=lambda one: -one[2])
        parts = [_Part(sequence, computed, sequence.tokens[computed:]) for sequence, computed, _ in asked]
        try:
            return LaunchedDrafts([part.sequence for part in parts], self._columns(parts, [own[2] for own in asked]))
        except torch.AcceleratorError:
            raise  # the device's context is lost
        except Exception as e:
            self._note_failure(e)
            return None

    def _note_failure(self, error: Exception) -> None:
        # It may be asked again in every step.
        level = logging.DEBUG if self._has_failed else logging.WARNING
        logger.log(
            level, "the draft model fails, and proposes nothing: %s: %s", type(error).__name__, first_line(error)
        )
        self._has_failed = True

    def _columns(self, parts: list[_Part], counts: list[int]) -> list[torch.Tensor]:
        """Sample counts[i] tokens behind part i, in LaunchedDrafts' columns; counts must not rise."""
        sequences, columns = [part.sequence for part in parts], [self._next(parts, 0, None)]
        for place in range(1, counts[0]):
            going = sequences[: sum(count > place for count in counts)]
            columns.append(self._following(going, place, columns[-1]))
        if self._paged.vocab_size > self._vocabulary:
            # A token beyond the other model's vocabulary stands for one that is rejected.
            columns = [column.clamp(max=self._vocabulary - 1) for column in columns]
        return columns

    def _following(self, sequences: list[Sequence], place: int, newest: torch.Tensor) -> torch.Tensor:
        """int64 [sequences]: the draft token behind place others of each; newest: those before, as of _next()."""
        if self._graphs is not None and self._is_laid_out:
            found = self._graphs.decode.run_next(newest[: len(sequences)])
            if found is not None:
                return self._sampled(found, sequences, place)
        return self._next([_Part(s, len(s.tokens) + place - 1, [PLACEHOLDER]) for s in sequences], place, newest)

    def _next(self, parts: list[_Part], place: int, newest: torch.Tensor | None) -> torch.Tensor:
        """int64 [parts]: the token behind each part, the draft token behind place others of its sequence.

        newest: the draft tokens before, of these sequences and perhaps of more behind them, which stand for the parts' ids.
        """
        graphs, batch = self._graphs, self._batch(parts)
        own = None if newest is None else newest[: len(parts)]
        self._is_laid_out = graphs is not None and graphs.decode.fits(batch)
        if graphs is not None and self._is_laid_out:
            output = graphs.decode.run(batch, own)
        elif graphs is not None and graphs.verify is not None and batch.num_tokens <= graphs.verify.sizes[-1]:
            output = _of_rows(graphs.verify.run(batch, own), batch.sampled_rows)
        else:
            batch = batch.to(self._paged.device)
            output = ModelOutput(self._paged.run(batch if own is None else replace(batch, ids=own)))
        return self._sampled(output, [part.sequence for part in parts], place)

    def _sampled(self, output: ModelOutput, sequences: list[Sequence], place: int) -> torch.Tensor:
        """int64 [sequences]: the token behind place draft tokens of each; the next replay leaves them as they are."""
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


def _of_rows(output: ModelOutput, wanted: torch.Tensor) -> ModelOutput:
    """Output of these rows alone, int64 in host memory."""
    assert output.greedy is not None
    rows = to_device(wanted.numpy(), output.logits.device)
    best, tokens = output.greedy
    return ModelOutput(output.logits[rows], (best[rows], tokens[rows]))
