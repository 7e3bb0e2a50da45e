"""The fit of the plan's costs: it finds those that launches were made from, by way of the file that it reads."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
import sys
from pathlib import Path

import pytest

from bench.kernels import fit_plan
from nf4_kernels.plan.wgmma import WGMMA_COSTS, WGMMA_INSTANCES, Wgmma, WgmmaCosts, wgmma_candidates, wgmma_cost

SHAPES = [(8192, 8192), (25600, 5120), (5120, 25600), (6144, 4096), (1024, 8192), (28672, 8192), (4096, 14336)]
# Of each instance some for one to six of its tiles.
TOKENS = sorted(
    {tiles * tokens - 3 for tokens, _ in WGMMA_INSTANCES for tiles in range(1, 7) if tiles * tokens <= 1024}
)
MULTIPROCESSORS = 132


@functools.cache
def launches(noise: float) -> list[dict[str, float]]:
    """Candidates of every shape and number of tokens, with the time that the model gives them, give or take noise."""
    draw = random.Random(7)
    found = []
    for n, k in SHAPES:
        for m in TOKENS:
            choices = list(wgmma_candidates(m, n, k, MULTIPROCESSORS))
            for choice in draw.sample(choices, min(len(choices), 60)):
                took = wgmma_cost(choice, m, n, k, MULTIPROCESSORS) * draw.gauss(1, noise)
                found.append({"m": m, "n": n, "k": k, **dataclasses.asdict(choice), "microseconds": took})
    return found


def test_the_costs_that_launches_were_made_from_are_found() -> None:
    found = fit_plan.fit(fit_plan.launches_of({"launches": launches(0.0)}), MULTIPROCESSORS)
    assert found.keys() == WGMMA_COSTS.keys()
    for instance, fitted in found.items():
        assert fitted.launches > 50
        assert fitted.rms < 1e-6
        expected = dataclasses.asdict(WGMMA_COSTS[instance])
        assert dataclasses.asdict(fitted.costs) == pytest.approx(expected, rel=1e-3, abs=0.01), instance


def test_noisy_launches_give_costs_that_predict_the_times_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within half of the noise. Single costs are known less well: some make up for one another."""
    noise, exact, errors = 0.01, launches(0.0), dict[tuple[int, int], list[float]]()
    for instance, fitted in fit_plan.fit(fit_plan.launches_of({"launches": launches(noise)}), MULTIPROCESSORS).items():
        assert fitted.rms == pytest.approx(noise, rel=0.2)
        monkeypatch.setitem(WGMMA_COSTS, instance, fitted.costs)
    for row in exact:
        choice = Wgmma(*(int(row[field.name]) for field in dataclasses.fields(Wgmma)))
        found = wgmma_cost(choice, int(row["m"]), int(row["n"]), int(row["k"]), MULTIPROCESSORS)
        errors.setdefault((choice.tokens, choice.groups), []).append(found / row["microseconds"] - 1)
    assert errors.keys() == WGMMA_COSTS.keys()
    for instance, own in errors.items():
        assert sum(error**2 for error in own) < len(own) * (noise / 2) ** 2, instance


def test_a_file_in_and_a_table_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "launches.json"
    given = [row for row in launches(0.0) if row["tokens"] == 64]
    file.write_text(json.dumps({"multiprocessors": MULTIPROCESSORS, "launches": given}))
    monkeypatch.setattr(sys, "argv", ["fit_plan", str(file)])
    assert fit_plan.main() == 0
    names = {"WgmmaCosts": WgmmaCosts}
    exec(capsys.readouterr().out, names)
    table = names["WGMMA_COSTS"]
    assert isinstance(table, dict)
    assert list(table) == [(64, 2), (64, 3)]
    for instance, costs in table.items():
        expected = dataclasses.asdict(WGMMA_COSTS[instance])
        assert dataclasses.asdict(costs) == pytest.approx(expected, rel=1e-3, abs=1e-6)
