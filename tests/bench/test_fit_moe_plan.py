"""Fitting the costs of moe_wgmma's launches: times that follow other costs are followed."""

from __future__ import annotations

import json

import pytest

from bench.kernels import fit_moe_plan
from bench.kernels.fit_moe_plan import Gemm, fit, gemms
from nf4_kernels.plan.moe import H200_COSTS, MoeWgmma, MoeWgmmaCosts, moe_candidates, moe_wgmma_cost

OTHER = MoeWgmmaCosts(1.2, 1.5, 0.6, 1.4, 2.4, 4.4, 3.0, 20.0, 1e-6)


def measured(costs: MoeWgmmaCosts) -> list[Gemm]:
    found = []
    for choices, chosen, n, k in ((512, 100.0, 768, 2048), (4096, 32.0, 2880, 2880), (16384, 8.0, 4096, 14336)):
        plans = moe_candidates(choices, 1, 128, n, k, 90, 132, nested=True, gated=True)
        times = [(p, moe_wgmma_cost(p, choices, chosen, n, k, costs)) for p in plans if isinstance(p, MoeWgmma)]
        found.append(Gemm(choices, chosen, n, k, times))
    return found


def test_other_costs_are_found() -> None:
    given = measured(OTHER)
    before, after = ([gemm.loss(costs) for gemm in given] for costs in (H200_COSTS, fit(given, rounds=1500)))
    assert sum(error for _, error in after) < sum(error for _, error in before) / 10
    assert max(slower for slower, _ in after) < 0.01


def test_the_library_has_the_costs_of_the_measured_launches(capsys: pytest.CaptureFixture[str]) -> None:
    rows = gemms(json.loads((fit_moe_plan.RESULTS / "moe-nvidia-h200.json").read_text()))
    assert len(rows) > 20
    slower = [gemm.loss(H200_COSTS)[0] for gemm in rows]
    assert sum(slower) / len(slower) < 0.01
    assert fit_moe_plan.main() == 0
    assert "fitted: chosen launches of" in capsys.readouterr().out
