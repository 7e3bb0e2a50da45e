"""The benchmark's yardstick gives the same bits as the oracle: else its time would be that of something else."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.tree import Tree
from nf4_kernels import Weight, reference
from nf4_kernels.build import find_nvcc

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_nvcc() is None, reason="needs nvcc"),
]


@pytest.mark.parametrize(("n", "k", "blocksize"), [(1, 2, 64), (63, 130, 64), (1000, 4160, 128), (4096, 4096, 64)])
def test_the_tree_dequantizes_as_the_oracle(n: int, k: int, blocksize: int) -> None:
    packed = torch.randint(0, 256, (n * k // 2,), dtype=torch.uint8, device="cuda")
    weight = Weight(packed, (n, k), torch.rand(-(-n * k // blocksize), device="cuda"), blocksize)
    torch.full((n, k), float("nan"), device="cuda", dtype=torch.bfloat16)
    assert torch.equal(Tree().dequantize(weight), reference.dequantize(weight, torch.bfloat16))


def test_nested_scales_are_refused() -> None:
    byte, scale = torch.zeros(64, dtype=torch.uint8, device="cuda"), torch.ones(1, device="cuda")
    nested = Weight(byte, (2, 64), scale, 64, byte[:2], torch.zeros(256, device="cuda"), scale)
    with pytest.raises(ValueError, match="plain scales only"):
        Tree().dequantize(nested)
