"""Parts of nested weights through every CUDA kernel, against the whole weight's own rows and columns.

Second-level scales that a part has no use for are NaN, so a scale of a wrong group is seen even where it is one of many.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nf4_kernels import Weight, cuda, reference
from nf4_kernels.cuda import launches
from nf4_kernels.cuda.device import arch
from nf4_kernels.format import nested_groups
from nf4_kernels.plan import WGMMA_INSTANCES, Dequantize, rows_candidates
from tests.nf4_kernels.cuda.cuda_weights import (
    DEVICE,
    HAS_ROWS,
    HOPPER,
    ON_GPU,
    TOLERANCE,
    Random,
    random_weight,
    relative_error,
    split,
)
from tests.nf4_kernels.shards import along_k, along_n

pytestmark = ON_GPU
BFLOAT16 = torch.bfloat16
HALVES = (torch.bfloat16, torch.float16)
# Columns in front of a part of k and behind it, in scale blocks: none or fewer than a group, more, one, other odd numbers.
AROUND = [(0, 4), (300, 0), (1, 2), (128, 384), (7, 250)]


def part_of_k(n: int, k: int, before: int, behind: int, blocksize: int = 64, offsets: bool = True) -> Random:
    """k columns of a fresh weight that has so many scale blocks in front of them, and behind."""
    first = before * blocksize
    whole = random_weight(n, first + k + behind * blocksize, blocksize, offsets=offsets).weight
    return Random(checked(along_k(whole, range(first, first + k)), whole, slice(None), slice(first, first + k)))


def part_of_n(n: int, k: int, before: int, blocksize: int = 64, offsets: bool = True) -> Random:
    """n rows of a fresh weight behind `before` others."""
    whole = random_weight(before + n + 3, k, blocksize, offsets=offsets).weight
    return Random(checked(along_n(whole, range(before, before + n)), whole, slice(before, before + n), slice(None)))


def checked(part: Weight, whole: Weight, rows: slice, columns: slice) -> Weight:
    """The part, once the oracle has shown that it is what it is of the whole."""
    expected = reference.dequantize(whole, torch.float32)[rows, columns]
    assert torch.equal(reference.dequantize(part, torch.float32), expected)
    return part


def is_right(w: Random, x: torch.Tensor, got: torch.Tensor) -> bool:
    return relative_error(got, x.double() @ w.exact().T) < TOLERANCE[x.dtype] * (3 if got.numel() < 64 else 1)


@pytest.mark.parametrize("blocksize", [32, 64, 128, 4096])
def test_dequantize_is_the_oracle_bit_for_bit(blocksize: int) -> None:
    parts = [part_of_k(n, 8 * blocksize, *around, blocksize) for n in (1, 7, 40) for around in AROUND]
    parts += [part_of_k(65, k // blocksize * blocksize, 300, 17, blocksize, offsets=False) for k in (4096, 25600)]
    parts += [part_of_n(n, 4096, before, blocksize) for n, before in [(1, 3), (33, 5), (513, 77)]]
    parts += [part_of_n(64, blocksize // 2, 30, blocksize)]
    for w in parts:
        for dtype in (torch.float32, *HALVES):
            expected = reference.dequantize(w.weight, dtype)
            assert torch.equal(cuda.dequantize(w.weight, dtype), expected), (w.weight.shape, dtype)
            # Codes that are not aligned take the kernel of one element a thread.
            moved = torch.empty(w.weight.packed.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:]
            moved.copy_(w.weight.packed.flatten())
            assert torch.equal(cuda.dequantize(replace(w.weight, packed=moved), dtype), expected), w.weight.shape


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("n", "k"), [(200, 8192), (90, 5376), (333, 1024), (48, 25600), (63, 192)])
def test_any_number_of_tokens(n: int, k: int, around: tuple[int, int]) -> None:
    for w in (part_of_k(n, k, *around), part_of_n(n, k, around[0])):
        for m in (1, 2, 8, 13, 16, 32, 33, 64, 129, 300, 1100):
            for dtype in HALVES:
                x = torch.randn(m, k, device=DEVICE, dtype=dtype)
                torch.full((m, n), float("nan"), device=DEVICE, dtype=dtype)
                assert is_right(w, x, w.linear(x)), (m, dtype)


@HAS_ROWS
@pytest.mark.parametrize("multiprocessors", [5, 9])
@pytest.mark.parametrize(("n", "k"), [(200, 8192), (333, 1024), (90, 5376)])
def test_every_rows_instance_however_its_work_is_split(
    n: int, k: int, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for w in (part_of_k(n, k, 128, 384), part_of_k(n, k, 1, 2), part_of_n(n, k, 7), part_of_k(n, k, 3, 9, 128)):
        for m in (1, 7):
            for choice in rows_candidates(n, k, arch(DEVICE), multiprocessors, True):
                monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
                x = torch.randn(m, k, device=DEVICE, dtype=BFLOAT16)
                torch.full((m, n), float("nan"), device=DEVICE, dtype=BFLOAT16)
                assert is_right(w, x, w.linear(x)), (str(choice), w.weight.group_offset, m)


@HOPPER
@pytest.mark.parametrize(("tokens", "groups"), WGMMA_INSTANCES)
def test_every_wgmma_instance_however_its_work_is_split(
    tokens: int, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, k, m, blocksize, around, blocks, first_steps in [
        (1000, 4160, tokens, 64, (7, 250), 132, 0),
        (63, 4096, tokens - 1, 64, (64, 192), 7, 0),
        (512, 4096, tokens, 64, (0, 64), 132, 0),
        (194, 448, 2 * tokens + 1, 128, (2, 3), 5, 0),
        (700, 1088, 9, 64, (1, 300), 132, 0),
        (1000, 4160, tokens + 1, 64, (65, 65), 2, 10),
        (193, 2304, tokens - 1, 128, (9, 9), 9, 1),
    ]:
        choice = split(tokens, groups, m, n, k, blocks, first_steps)
        monkeypatch.setattr(launches, "_plan", lambda *_, choice=choice: choice)
        parts = [part_of_n(n, k, 2 * around[1], blocksize)]
        if k % blocksize == 0:
            parts.append(part_of_k(n, k, *around, blocksize))
        for w in parts:
            for dtype in HALVES:
                x = torch.randn(m, k, device=DEVICE, dtype=dtype)
                torch.full((m, n), float("nan"), device=DEVICE, dtype=dtype)
                assert is_right(w, x, w.linear(x)), (str(choice), n, k)


@HOPPER
def test_norms_residuals_tiles_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused launches give the bits that they give with the same scales as plain float32, or is as near to the oracle."""
    for w in (part_of_k(512, 4096, 64, 192), part_of_n(512, 4096, 7), part_of_k(512, 4160, 1, 64)):
        for m in (4, 16, 40, 130, 256):
            x, residual = (torch.randn(m, size, device=DEVICE, dtype=BFLOAT16) for size in (w.k, w.n))
            norm_weight = torch.randn(w.k, device=DEVICE, dtype=BFLOAT16)
            normed = reference.rms_norm(x.double(), norm_weight.double(), 1e-5)
            got = cuda.fused_linear(x, w.weight, None, residual, norm_weight, 1e-5)
            exact = normed @ w.exact().T + residual.double()
            assert relative_error(got, exact) < 1e-2, m
            tile = cuda.token_tile(DEVICE, BFLOAT16, m, w.weight.shape, 64, True)
            if tile:
                tiles = reference.tile_activations(x, tile)
                expected = cuda.fused_linear(x, w.weight, None, residual)
                assert torch.equal(cuda.tiled_linear(tiles, m, w.weight, None, residual), expected), m
            if not cuda.can_gate(DEVICE, BFLOAT16, m, w.weight.shape, 64, True, False):
                continue
            with monkeypatch.context() as patch:
                patch.setattr(cuda, "gated", None)  # torch's operations in its place
                gated = cuda.gated_linear(x, w.weight)
            gate, up = (x.double() @ w.exact().T).chunk(2, -1)
            assert relative_error(gated, torch.nn.functional.silu(gate) * up) < 2e-2, m


@pytest.mark.parametrize("rows", [1, 100, 512])
def test_slices(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_plan", lambda *_: Dequantize(rows))
    for w in (part_of_k(300, 4096, 7, 250), part_of_n(300, 4096, 7)):
        for dtype in (torch.float32, *HALVES):
            x = torch.randn(70, w.k, device=DEVICE, dtype=dtype)
            assert is_right(w, x, w.linear(x)), dtype


def test_wrong_geometry_is_named() -> None:
    w = part_of_k(64, 1024, 16, 240)
    x = torch.randn(2, 1024, device=DEVICE, dtype=BFLOAT16)
    needed = nested_groups(w.weight, 64 * 16)
    with pytest.raises(ValueError, match=f"absmax has {needed - 1} elements, the weight needs {needed}"):
        cuda.linear(x, replace(w.weight, absmax=w.weight.absmax[:-1], absmax_offset=torch.zeros(1, device=DEVICE)))
    with pytest.raises(ValueError, match="at least 0, got 16 and -1"):
        cuda.linear(x, replace(w.weight, group_skip=-1))
    with pytest.raises(ValueError, match="whole scale blocks of 128, got K = 1088"):
        cuda.dequantize(replace(w.weight, shape=(32, 1088), blocksize=128), torch.float32)
