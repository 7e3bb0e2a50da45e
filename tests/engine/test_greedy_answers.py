"""Checks of greedy answers on a GPU: they hold of a right engine, and not of one whose model is a little off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.greedy_answers import LIMITS, NEAR_TIE, check_behind, compare, random_prompts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def behind(name: str, folder: Path, change: Callable[[Any], None]) -> torch.Tensor:
    return compare(name, folder, torch.device("cpu"), random_prompts(12), change, **LIMITS)[0]


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.3-70b"])
def test_of_a_right_engine(name: str, tmp_path: Path) -> None:
    check_behind(behind(name, tmp_path, lambda model: None), NEAR_TIE, 0.85, 0.975)


def one_norm(model: Any) -> None:
    model.model.layers[3].input_layernorm.weight.data *= 1.05


def epsilon(model: Any) -> None:
    model.model.layers[3].input_layernorm.variance_epsilon = 1e-2


@pytest.mark.parametrize("change", [one_norm, epsilon])
def test_of_a_wrong_one(change: Callable[[Any], None], tmp_path: Path) -> None:
    """Each of the three bounds alone finds it."""
    found = behind("llama-3.3-70b", tmp_path, change)
    best = (found == 0).float()
    assert found.max() > NEAR_TIE
    assert best.mean(1).min() < 0.85
    assert best.mean() < 0.975
