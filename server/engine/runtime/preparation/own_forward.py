"""Check that a model over the paged cache computes what its class computes by itself; if not, its text would be wrong."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.attention.calls import IMPLEMENTATION
from server.engine.runtime.batch import Batch, Span, Spans
from server.engine.runtime.exchange import agreed
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.model.class_forward import takes
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.cache import CacheSpec, PagedWith
from server.engine.runtime.preparation.states import own_mixers
from server.engine.runtime.preparation.trial_steps import growth
from server.engine.runtime.trials import failure

logger = logging.getLogger(__name__)

_TOLERANCES = {torch.float32: 0.02, torch.bfloat16: 0.4, torch.float16: 0.1}
"""Largest difference of a token's logits, relative to their deviation from their mean, by dtype of the activations.

Logits of wrong text differ by 0.5 to 1.4. The median token of a chunk counts: a router may choose another expert for single
tokens by rounding.
"""
_EIGHT_BITS = 0.5
"""The same for a cache in 8 bits."""
_LONGEST_WINDOW = 64
"""Windows up to this many tokens are exceeded. Longer ones are what their masks say (attention/masks.py)."""


class _Chunk(NamedTuple):
    sequence: int
    start: int
    length: int

    @property
    def kind(self) -> str:
        """The chunk in words."""
        if self.start == 0:
            return "a first chunk"
        return "a decode step" if self.length == 1 else "a chunk that continues"


def check_own_forward(paged_with: PagedWith, spec: CacheSpec, limits: ModelLimits) -> None:
    """Raise UnsupportedModelError, which names the class, if it computes other logits over the paged cache than by itself.

    Two sequences of different lengths go through a small cache: first chunks in one step, a chunk that continues with a
    token of the other sequence, decode steps. All ranks of a divided model must call it. Call in inference mode.
    """
    windows = [own.window for own in spec.options if own.window is not None and own.window <= _LONGEST_WINDOW]
    lengths = min(max([14, *(window + 6 for window in windows)]), limits.max_model_len), 7
    paged = paged_with(2 * -(-lengths[0] // spec.block_size))
    wrong: list[str] = []
    failed = failure(lambda: wrong.extend(_differences(paged, lengths, _tolerance(paged, spec.cache_dtype))))
    if agreed(failed is None and not wrong):
        return
    name = type(paged.model).__name__
    if failed is not None:
        raise UnsupportedModelError(f"{name} cannot be served: its forward of text alone fails ({failed})")
    missing = [what for what in ("position_ids", "logits_to_keep") if not takes(paged.model, what)]
    hint = f"; its forward takes no {' and no '.join(missing)}" if missing else ""
    reason = wrong[0] if wrong else "another rank's logits differ"
    raise UnsupportedModelError(f"{name} cannot be served, its text would be wrong: {reason}{hint}")


def _tolerance(paged: PagedModel, cache_dtype: torch.dtype) -> float:
    own = _TOLERANCES[paged.dtype] * growth(paged)
    return max(own, _EIGHT_BITS) if cache_dtype.itemsize == 1 else own


def _differences(paged: PagedModel, lengths: tuple[int, int], tolerance: float) -> list[str]:
    """In words, which logits differ by more than rounding."""
    sequences = [_plain_tokens(paged.model, first, length) for first, length in zip((101, 211), lengths, strict=True)]
    with own_mixers(paged.states):
        expected = [_own_logits(paged.model, ids.to(paged.device)) for ids in sequences]
    if not all(bool(logits.isfinite().all()) for logits in expected):
        # Eager attention may overflow in float16 where kernels, which sum in float32, do not.
        logger.warning("the class's own logits are not finite in %s, so nothing is compared with them", paged.dtype)
        return []
    errors = defaultdict(list)
    for chunks in _steps(lengths):
        # In another order than the tokens', for classes that give all tokens' rows whatever they are asked for.
        found = paged.run_class(_batch(chunks, sequences, paged.block_size)).flip(0)
        own = torch.cat([expected[each.sequence][each.start : each.start + each.length] for each in chunks])
        if found.shape != own.shape:
            return [f"logits of {own.shape[0]} tokens have {found.shape[0]} rows"]
        for chunk, rows in zip(chunks, _errors(found, own).split([each.length for each in chunks]), strict=True):
            errors[chunk.sequence, chunk.kind].append(rows)
    medians = [(kind, float(torch.cat(rows).median())) for (_, kind), rows in errors.items()]
    largest = max(error for _, error in medians)
    logger.info("warm-up check: logits with the paged KV cache are within %.1e of transformers' without it", largest)
    return [
        f"logits of {kind} are off by {error:.0%} from those of its own forward"
        for kind, error in medians
        if not error <= tolerance
    ]


def _steps(lengths: tuple[int, int]) -> list[list[_Chunk]]:
    """The chunks of each step, those of one token first."""
    longer, _ = lengths
    decodes = [[_Chunk(0, longer - 3 + i, 1), _Chunk(1, 4 + i, 1)] for i in range(3)]
    return [[_Chunk(0, 0, 5), _Chunk(1, 0, 3)], [_Chunk(1, 3, 1), _Chunk(0, 5, longer - 8)], *decodes]


def _batch(chunks: list[_Chunk], sequences: list[torch.Tensor], block_size: int) -> Batch:
    """A step of both sequences, each with every second KV block. The logits of all rows are wanted, last row first."""
    spans, ids, places, slots, row = [], [], [], [], 0
    for which, start, length in chunks:
        place = torch.arange(start, start + length)
        blocks = range(which, 2 * -(-(start + length) // block_size), 2)
        spans.append(Span(row, start, length, blocks))
        ids.append(sequences[which][start : start + length])
        places.append(place)
        slots.append((2 * (place // block_size) + which) * block_size + place % block_size)
        row += length
    singles = sum(length == 1 for _, _, length in chunks)
    wanted = torch.arange(row).flip(0)
    rows = [which for which, _, _ in chunks]
    return Batch(torch.cat(ids), torch.cat(places), torch.cat(slots), wanted, Spans.of(spans, rows), singles)


def _errors(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Float32 [rows]: the norm of each row's difference over that of the expected row, both without their means."""
    difference, own = (rows - rows.mean(-1, keepdim=True) for rows in (found - expected, expected))
    errors: torch.Tensor = difference.norm(dim=-1) / own.norm(dim=-1).clamp(min=1e-30)
    return errors


def _own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits float32 [tokens, vocabulary] of one sequence by the class's own forward and attention, without a cache."""
    decoder = model.get_decoder()
    decoder.set_attn_implementation("eager")
    try:
        logits: torch.Tensor = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0].float()
    finally:
        decoder.set_attn_implementation(IMPLEMENTATION)
    return logits


def _plain_tokens(model: PreTrainedModel, first: int, count: int) -> torch.Tensor:
    """Int64 [count]: ids that the configuration gives no meaning, such as an image's or padding."""
    config = model.config
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    fields = [(name, value) for part in parts if part is not None for name, value in vars(part).items()]
    special = {value for name, value in fields if "token_i" in name and isinstance(value, int)}
    size = config.get_text_config().vocab_size
    plain = (token for token in ((first + 17 * i) % size for i in range(size)) if token not in special)
    return torch.tensor([*itertools.islice(itertools.cycle(plain), count)])
