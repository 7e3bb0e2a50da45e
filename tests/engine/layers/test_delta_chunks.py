"""The gated delta rule over chunks of prompts: how they are cut, and fla's results against the recurrence in float64."""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from server.engine.runtime.layers.stateful import delta_chunks, pieces
from server.engine.runtime.states.kinds import LONG_CHUNK, gated_delta
from server.engine.runtime.states.pool import StateStep
from tests.engine.interpreted import run_interpreted
from tests.nf4_kernels.gated_delta_layers import Layer, Sequence, flags, indices, is_close, random_layer


def test_pieces_cover_all_rows_in_order() -> None:
    layer = random_layer((1, 2, 16, 16), slots=4)
    p = layer.tensors(layer.inputs(300))
    parts = list(pieces._cut([100, 0, 30, 170], 128))
    assert parts == [
        (0, [(0, 100, False), (2, 28, False)]),
        (128, [(2, 2, True), (3, 126, False)]),
        (256, [(3, 44, True)]),
    ]
    found = pieces.cut(
        delta_chunks.max_tokens(p), [100, 0, 30, 170], indices(3, 2, 1, -1), flags(False, True, False, True)
    )
    assert [(piece.begin, piece.end) for piece in found] == [(0, 300)]
    assert found[0].bounds.tolist() == [0, 100, 130, 300]
    assert found[0].chunks.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [2, 1], [2, 2]]
    assert found[0].slots.tolist() == [3, 1, -1]
    assert found[0].has_state.tolist() == [False, False, True]
    assert pieces.cut(delta_chunks.max_tokens(p), [], indices(), flags()) == []


def test_the_largest_model_stays_below_the_bound() -> None:
    layer = random_layer((16, 48, 128, 128), slots=1, dtype=torch.bfloat16)
    assert 1500 < delta_chunks.max_tokens(layer.tensors(layer.inputs(1))) < 2600


def recurrence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """fla's chunk_gated_delta_rule in float64, token by token and head by head."""
    states, o, bounds = given["initial_state"].double(), v.double(), given["cu_seqlens"].tolist()
    group = v.shape[2] // k.shape[2]
    for sequence, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for token in range(begin, end):
            for head in range(v.shape[2]):
                key, query = k[0, token, head // group].double(), q[0, token, head // group].double() * given["scale"]
                s = states[sequence, head] * g[0, token, head].double().exp()
                s = s + torch.outer(key, beta[0, token, head].double() * (v[0, token, head].double() - key @ s))
                states[sequence, head], o[0, token, head] = s, query @ s
    return o.to(v.dtype), states.float()


def check_chunks(layer: Layer, bound: float, is_captured: bool = False) -> None:
    """A padding sequence, one without tokens, sequences that begin and that go on, and rows behind the chunks.

    is_captured: in the one piece of a CUDA graph, where the results of those rows go nowhere.
    """
    device = layer.state.device.type
    lengths, slots = (1, 70, 2, 0, 64, 130, 5), (6, 0, -1, 2, 3, 4, 7)
    has_state = (True, False, True, True, True, False, True)
    sequences = [
        Sequence.at(layer, max(slot, 0)) if goes_on else Sequence.new(layer)
        for slot, goes_on in zip(slots, has_state, strict=True)
    ]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    inputs = layer.inputs(starts[-1] + 3)
    for x in inputs:
        x[starts[2] : starts[3]] = x[starts[-1] :] = float("nan")
    p = layer.tensors(inputs)
    bounds = torch.tensor(starts, dtype=torch.int32, device=device)
    chunks, goes_on = indices(*slots, device=device), flags(*has_state, device=device)
    step = StateStep(chunks[:0], chunks, bounds, goes_on, lengths, is_captured=is_captured)
    kind = gated_delta(1, 1, 1, 1, 1, torch.float32)
    own = pieces.pieces_of(step, kind, starts[-1] + 3, delta_chunks.max_tokens(p))
    out = delta_chunks.chunks(p, own)
    assert is_captured or not out[starts[-1] :].any()
    for i, slot in enumerate(slots):
        rows = slice(starts[i], starts[i + 1])
        if slot >= 0 and lengths[i]:
            assert is_close(out[rows], sequences[i].advance(*(x[rows] for x in inputs)), bound)
            assert is_close(layer.state[slot], sequences[i].state, bound)
            assert torch.equal(layer.conv_state[slot].double().cpu(), sequences[i].conv_state)


def check_interpreted(is_captured: bool) -> None:
    """The launches around fla's, in pieces of 64 tokens or in that of a graph."""
    delta_chunks._rule = lambda: recurrence  # type: ignore[assignment]
    delta_chunks.MAX_LIVE_BYTES = 1
    check_chunks(random_layer((2, 6, 16, 8), slots=8), 2e-5, is_captured)


@pytest.mark.parametrize("is_captured", [False, True])
def test_launches_around_the_rule(is_captured: bool) -> None:
    pytest.importorskip("triton")
    run_interpreted(
        f"from tests.engine.layers.test_delta_chunks import check_interpreted; check_interpreted({is_captured})"
    )


def test_configurations_have_the_names_of_kernels() -> None:
    """fla tunes a kernel that no file names, which takes seconds."""
    found = importlib.util.find_spec("fla")
    if found is None:
        pytest.skip("fla-core is not installed")
    sources = [
        file.read_text() for place in found.submodule_search_locations or () for file in Path(place).rglob("*.py")
    ]
    for file in delta_chunks._CONFIGS.glob("*.json"):
        assert any(f"def {file.stem}(" in source for source in sources), file.stem


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype"), [((2, 6, 128, 128), torch.bfloat16), ((2, 2, 64, 32), torch.float16)])
@pytest.mark.parametrize(
    ("max_live_bytes", "is_captured"), [(delta_chunks.MAX_LIVE_BYTES, False), (1, False), (1, True)]
)
def test_fla_gives_the_recurrence(
    heads: tuple[int, int, int, int],
    dtype: torch.dtype,
    max_live_bytes: int,
    is_captured: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one piece, in pieces of 64 tokens, and in that of a graph."""
    monkeypatch.setattr(delta_chunks, "MAX_LIVE_BYTES", max_live_bytes)
    layer = random_layer(heads, slots=8, dtype=dtype, device="cuda")
    assert delta_chunks.takes(layer.tensors(layer.inputs(1)), LONG_CHUNK)
    check_chunks(layer, 2e-2, is_captured)
