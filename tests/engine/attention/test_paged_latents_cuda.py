"""Attention over latents by our Triton kernels beside the reference in float32, and over expanded keys in long chunks."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from server.engine.runtime.attention.base import AttentionOptions, LayerShape
from server.engine.runtime.attention.latent import DenseHeads, HeadSizes
from server.engine.runtime.attention.paged_cuda import CudaBackend
from server.engine.runtime.attention.sdpa import SdpaBackend
from server.engine.runtime.trials import relative_error
from tests.engine.attention.paged_steps import BLOCK, CAPPED, DEVICE, PLAIN, TOLERANCES, WINDOW, check, make_batch

pytestmark = pytest.mark.gpu

GLM, DEEPSEEK, MINICPM = (
    LayerShape(1, rank + rotary, rank, heads, is_latent=True)
    for rank, rotary, heads in ((512, 64, 20), (512, 64, 16), (256, 32, 40))
)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("shape", "options", "earlier", "now", "graphs"),
    [
        (GLM, PLAIN, [8999, 0, 1, 63, 64], [9000, 1, 2, 64, 65], ("", "decode", "shared")),
        (GLM, PLAIN, [699, 40, 100, 0, 3], [700, 41, 140, 213, 8], ("", "mixed")),
        (DEEPSEEK, PLAIN, [*range(0, 139, 5), 1023], [*range(1, 140, 5), 1024], ("", "decode")),
        (DEEPSEEK, CAPPED, [600, 298, 15], [608, 302, 17], ("mixed", "shared")),
        (MINICPM, WINDOW, [61, 200, 1024, 1], [69, 204, 1025, 4], ("", "mixed", "shared")),
        (MINICPM, PLAIN, [4999], [5000], ("decode",)),
    ],
)
def test_a_step_attends_over_latents_as_the_reference(
    shape: LayerShape,
    options: AttentionOptions,
    earlier: list[int],
    now: list[int],
    graphs: tuple[str, ...],
    dtype: torch.dtype,
) -> None:
    for graph in graphs:
        check(shape, options, dtype, dtype, earlier, now, graph)


@pytest.mark.parametrize(
    ("earlier", "now"),
    [([0], [700]), ([299, 0, 300, 400], [300, 900, 1000, 420]), ([0, 1000], [300, 1600]), ([4000], [5000])],
)
@pytest.mark.parametrize(("plain", "width"), [(192, 256), (128, 128)])
@torch.inference_mode()
def test_long_chunks_of_latents_attend_as_the_reference(
    plain: int, width: int, earlier: list[int], now: list[int]
) -> None:
    torch.manual_seed(0)
    sizes, dtype = HeadSizes(20, plain, width, 512), torch.bfloat16
    weight = torch.randn(20 * (plain + width), 512, device=DEVICE).div(23).to(dtype)
    heads = DenseHeads.of(weight, sizes, lambda latent: latent @ weight.T)
    wide = DenseHeads.of(weight.float(), sizes, lambda latent: latent @ weight.float().T)
    count = sum(-(-end // BLOCK) for end in now)
    free = iter(random.Random(1).sample(range(count), count))
    tables = [tuple(itertools.islice(free, -(-end // BLOCK))) for end in now]
    tested = CudaBackend([GLM], [PLAIN], count, BLOCK, dtype, DEVICE)
    reference = SdpaBackend([GLM], count, BLOCK, torch.float32, DEVICE)
    for pieces in ([(0, end) for end in earlier], list(zip(earlier, now, strict=True))):
        present = [i for i, (start, end) in enumerate(pieces) if start < end]
        batch = make_batch([pieces[i] for i in present], [tables[i] for i in present])
        tokens = batch.slots.shape[0]
        if not tokens:
            continue
        query = torch.randn(tokens, 20, plain + 64, device=DEVICE).to(dtype)
        latent = torch.randn(tokens, 1, 576, device=DEVICE).to(dtype)
        tested.begin(batch)
        reference.begin(batch)
        found = tested.attend_latent(0, query, latent, heads, PLAIN)
        expected = reference.attend_latent(0, query.float(), latent.float(), wide, PLAIN)
        assert relative_error(found, expected) < 0.01
    assert tested._expanded
