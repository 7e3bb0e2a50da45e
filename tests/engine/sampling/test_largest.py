"""The largest logits of rows and their tokens: on any device those of torch's maximum, the first of equal ones, and NaN."""

from __future__ import annotations

import pytest
import torch

from server.engine.runtime.sampling import ops


def check_rows(rows: int, vocabulary: int, dtype: torch.dtype, device: str) -> None:
    """Compare random rows, among them some with equal largest logits, infinite ones and NaN; strided and not."""
    generator = torch.Generator().manual_seed(rows * vocabulary)
    wide = torch.randn(rows, vocabulary + 24, generator=generator).mul_(4).to(dtype)
    wide[:, vocabulary:] = 1e4
    logits = wide[:, :vocabulary]
    logits[rows // 2] = -torch.inf
    logits[rows - 1, torch.randint(vocabulary, (3,), generator=generator)] = 77.0
    if rows > 3:
        logits[1, vocabulary - 1] = torch.nan
        logits[3] = torch.nan
        logits[2, 0] = torch.inf
    best, tokens = logits.double().max(dim=-1)
    for given in (wide.to(device)[:, :vocabulary], logits.contiguous().to(device)):
        # The kernel leaves its counters as it found them.
        for _ in range(2):
            found, indices = ops.largest_of_rows(given)
            assert found.dtype == torch.float32
            torch.testing.assert_close(found.cpu().double(), best, rtol=0, atol=0, equal_nan=True)
            numbers = ~best.isnan()
            assert torch.equal(indices.cpu()[numbers], tokens[numbers])
            assert ((indices >= 0) & (indices < vocabulary)).all()


CASES = [(1, 151_936), (1, 9), (5, 8192), (6, 128_257), (37, 8193), (129, 20_000), (300, 1000)]


@pytest.mark.parametrize(("rows", "vocabulary"), CASES)
def test_by_torch(rows: int, vocabulary: int) -> None:
    check_rows(rows, vocabulary, torch.bfloat16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("rows", "vocabulary"), CASES)
def test_by_the_kernel(rows: int, vocabulary: int, dtype: torch.dtype) -> None:
    ops.use_kernels(torch.device("cuda", 0), dtype, vocabulary)
    assert "cuda" in ops._kernels
    check_rows(rows, vocabulary, dtype, "cuda")
