"""The time of steps by their number of tokens, measured at the start, by which draft tokens are planned (speculation)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from server.engine.contention import barriers
from server.engine.runtime.graphs.graph_set import DRAFT_SIZES, GraphSet
from server.engine.runtime.graphs.invariant import INVARIANT_ROWS
from server.engine.runtime.limits import ModelLimits
from server.engine.runtime.paged_model import PagedModel
from server.engine.runtime.preparation.trial_steps import TrialSteps
from server.engine.runtime.runner import StepGraphs
from server.engine.speculation.costs import StepCosts

_SIZES = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_REPEATS = 4
_REPLAYS = 8


def measure_steps(
    paged: PagedModel, limits: ModelLimits, graphs: StepGraphs, drafting: Mapping[int, float] | None = None
) -> StepCosts:
    """The least seconds that steps of few tokens took in some runs. Call in inference mode, before the engine serves.

    drafting: draft_times() of the draft model, where there is one.
    """
    steps = TrialSteps(paged)
    if graphs.decode is not None and graphs.batch_invariant:
        groups = {INVARIANT_ROWS: _of_decode_graph(graphs.decode, steps, INVARIANT_ROWS)}
        return StepCosts(groups, drafting=drafting)
    if graphs.decode is not None:
        # Draft tokens of sequences with states are chunks.
        verify = graphs.verify if paged.states is None else graphs.mixed
        verifying, plain = _of_graphs(graphs.decode, verify, steps, limits)
        return StepCosts(verifying, plain, drafting)
    sizes = [size for size in _SIZES if size <= limits.max_model_len]
    return StepCosts(_least(steps.run, sizes, _REPEATS), drafting=drafting)


def draft_times(paged: PagedModel, limits: ModelLimits, decode: GraphSet | None) -> dict[int, float]:
    """Seconds of a draft model's steps by their number of tokens, one for each sequence. Call in inference mode."""
    steps = TrialSteps(paged)
    if decode is not None:
        return {size: _of_decode_graph(decode, steps, size) for size in decode.sizes}
    return _least(steps.run, [size for size in _SIZES if size <= limits.max_model_len], _REPEATS)


def _of_graphs(
    decode: GraphSet, verify: GraphSet | None, steps: TrialSteps, limits: ModelLimits
) -> tuple[dict[int, float], dict[int, float]]:
    """Measure steps with draft tokens and steps without: their seconds by size.

    With draft tokens the time until the tokens are read counts. Without, steps are scheduled asynchronously, so the device's
    time counts. verify: graphs of steps with draft tokens; None: these run without graphs.
    """
    sizes = [size for size in DRAFT_SIZES if size <= limits.max_model_len]

    def verified(size: int) -> torch.Tensor:
        return steps.run(size) if verify is None else verify.run(steps.first_chunk(size)).logits

    verifying = _least(verified, sizes, _REPLAYS)
    plain_sizes = [size for size in decode.sizes if size <= sizes[-1]]
    return verifying, {size: _of_decode_graph(decode, steps, size) for size in plain_sizes}


def _of_decode_graph(decode: GraphSet, steps: TrialSteps, size: int) -> float:
    """Seconds of a decode graph of size tokens, one after another without a wait between."""
    return min(_replays(decode, steps, size) for _ in range(_REPEATS))


def _replays(decode: GraphSet, steps: TrialSteps, size: int) -> float:
    # Each step follows the one before, as states need it.
    first, *others = (steps.singles(size, place) for place in range(1 + _REPLAYS))
    decode.run(first).logits.argmax(dim=-1).tolist()
    begun = time.perf_counter()
    for batch in others:
        output = decode.run(batch)
    output.logits.argmax(dim=-1).tolist()
    return (time.perf_counter() - begun) / _REPLAYS


def _least(run: Callable[[int], torch.Tensor], sizes: Sequence[int], repeats: int) -> dict[int, float]:
    """Measure the least seconds until the tokens of run(size) are on the host, for each size.

    Sizes are measured alternately, so that a delay of the machine does not fall on one of them alone.
    """

    def seconds(size: int) -> float:
        begun = time.perf_counter()
        run(size).argmax(dim=-1).tolist()
        return time.perf_counter() - begun

    with barriers(sleep=False):  # as while requests are served
        rounds = [{size: seconds(size) for size in sizes} for _ in range(repeats + 1)]
    # The first round warms up.
    return {size: min(own[size] for own in rounds[1:]) for size in sizes}
