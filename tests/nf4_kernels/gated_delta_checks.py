"""Checks of nf4_kernels.gated_delta on every device."""

from __future__ import annotations

import torch

from tests.nf4_kernels.gated_delta_layers import BOUNDS, Layer, Sequence, flags, indices, is_close


def check_step(layer: Layer, slots: tuple[int, ...]) -> None:
    """Two steps of the sequences at these slots; other slots stay as they are, rows of padding are poisoned."""
    device, bound = layer.state.device.type, max(BOUNDS[layer.dtype], BOUNDS[layer.state.dtype])
    sequences = [Sequence.at(layer, max(slot, 0)) for slot in slots]
    kept = [slot for slot in range(len(layer.state)) if slot not in slots]
    before = layer.state[kept].clone(), layer.conv_state[kept].clone()
    for seed in (1, 2):
        inputs = layer.inputs(len(slots), seed)
        for row, slot in enumerate(slots):
            if slot < 0:
                for x in inputs:
                    x[row] = float("nan")
        out = layer.step(inputs, indices(*slots, device=device))
        assert out.isfinite().all()
        for row, slot in enumerate(slots):
            if slot >= 0:
                exact = sequences[row].advance(*(x[row : row + 1] for x in inputs))
                assert is_close(out[row : row + 1], exact, bound)
                assert is_close(layer.state[slot], sequences[row].state, bound)
                assert torch.equal(layer.conv_state[slot].double().cpu(), sequences[row].conv_state)
    assert torch.equal(layer.state[kept], before[0])
    assert torch.equal(layer.conv_state[kept], before[1])


def check_chunks(layer: Layer, lengths: tuple[int, ...], slots: tuple[int, ...], has_state: tuple[bool, ...]) -> None:
    """One call for chunks of these lengths, with three rows of no sequence at the end."""
    device, bound = layer.state.device.type, max(BOUNDS[layer.dtype], BOUNDS[layer.state.dtype])
    sequences = [
        Sequence.at(layer, max(slot, 0)) if continues else Sequence.new(layer)
        for slot, continues in zip(slots, has_state, strict=True)
    ]
    starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    kept = [slot for slot in range(len(layer.state)) if slot not in slots]
    before = layer.state[kept].clone(), layer.conv_state[kept].clone()
    inputs = layer.inputs(starts[-1] + 3)
    for x in inputs:
        x[starts[-1] :] = float("nan")
        for begin, end, slot in zip(starts, starts[1:], slots, strict=False):
            if slot < 0:
                x[begin:end] = float("nan")
    out = layer.chunks(
        inputs, indices(*starts, device=device), indices(*slots, device=device), flags(*has_state, device=device)
    )
    assert out.isfinite().all()
    for i, slot in enumerate(slots):
        rows = slice(starts[i], starts[i + 1])
        if slot >= 0 and lengths[i]:
            assert is_close(out[rows], sequences[i].advance(*(x[rows] for x in inputs)), bound)
            assert is_close(layer.state[slot], sequences[i].state, bound)
            assert torch.equal(layer.conv_state[slot].double().cpu(), sequences[i].conv_state)
    assert torch.equal(layer.state[kept], before[0])
    assert torch.equal(layer.conv_state[kept], before[1])
