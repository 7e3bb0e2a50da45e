"""Experts' GEMMs of many choices by dequantization and a Triton kernel, in Triton's interpreter."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from nf4_kernels import Weight, moe_torch, reference
from nf4_kernels.plan import moe as plan_moe
from nf4_kernels.plan.moe import MoeGrouped
from tests.engine.interpreted import run_interpreted


def check() -> None:
    """Every choice times its expert's weight, in slices of one and of several experts; experts nobody chose, and none.

    With what comes after it, too: a choice whose expert does not exist counts for nothing.
    """
    from nf4_kernels.cuda import grouped, moe

    weights: dict[int, torch.Tensor] = {}

    def dequantize_into(out: torch.Tensor, struct: object, first: int, count: int) -> None:
        out.view(-1)[:count] = weights[0].view(-1)[first : first + count]

    grouped.dequantize_into = dequantize_into
    torch.manual_seed(0)
    for (experts, n, k, tokens, top_k), at_once in itertools.product(
        ((5, 40, 64, 21, 2), (3, 136, 128, 70, 1), (9, 16, 192, 4, 3)), (1, 2, 100)
    ):
        plan_moe.DEQUANTIZED_BYTES = at_once * n * k * 2
        packed = torch.randint(0, 256, (experts * n * k // 2, 1), dtype=torch.uint8)
        weight = Weight(packed, (experts, n, k), torch.rand(experts * n * k // 64), 64)
        weights[0] = reference.dequantize(weight, torch.float32)
        ids = torch.randint(-1, experts + 1, (tokens, top_k), dtype=torch.int32)
        ids[ids == 1] = 0
        known = (ids >= 0) & (ids < experts)
        for x in (torch.randn(tokens, k), torch.randn(tokens, top_k, k)):
            out = grouped.grouped_linear(x, weight, ids, MoeGrouped(16)).view(tokens, top_k, n)
            rows = x if x.dim() == 3 else x[:, None].expand(tokens, top_k, k)
            wanted = torch.einsum("tcnk,tck->tcn", weights[0][ids.clamp(0, experts - 1).long()], rows)
            torch.testing.assert_close(out[known], wanted[known], rtol=2e-5, atol=2e-4)
            bias, routing = torch.randn(experts, n), torch.rand(tokens, top_k)
            of_known = routing.masked_fill(~known, torch.nan)
            for whole, expected in (
                (moe._grouped(MoeGrouped(16), x, weight, ids, bias, of_known, None),
                 moe_torch.moe_linear(x, weight, ids, bias, routing)),
                (moe._grouped(MoeGrouped(16), x, weight, ids, None, None, "swiglu_oai"),
                 moe_torch.moe_gated_linear(x, weight, ids, "swiglu_oai", None)),
            ):  # fmt: skip
                torch.testing.assert_close(whole, expected, rtol=1e-3, atol=1e-3)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted("from tests.nf4_kernels.cuda.test_grouped import check; check()")


def test_the_workspace_is_bounded() -> None:
    plan = MoeGrouped(64)
    assert plan.experts_at_once(32, 5760, 2880) == 4
    assert plan.experts_at_once(8, 28672, 4096) == 1
    assert plan.experts_at_once(4, 64, 64) == 4
    assert plan.most_tiles(3, 128) == 3
    assert dataclasses.replace(plan, tokens=128).most_tiles(1000, 32) == 39
