"""Use of measured times of launches by an engine: on GPUs alone, as rank 0 says, not with batch_invariant."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nf4_kernels import cuda, tune
from server.config import EngineConfig
from server.engine.runtime import exchange
from server.engine.runtime.preparation import tuning

TIMES = {"a shape": {8: {"a launch": 2.5}}}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU whose times are there; what choices were told to use."""
    found: list[Any] = []
    for where, name, value in (
        (cuda, "load_error", lambda: None),
        (tuning, "decoder_layers", lambda model: []),
        (tuning, "use_times", lambda device, times: found.append(times)),
        (tune, "tuned", lambda shapes, dtype, progress: TIMES),
    ):
        monkeypatch.setattr(where, name, value)
    return found


def choose(device: str = "cuda", **config: Any) -> None:
    model: Any = SimpleNamespace(device=torch.device(device), dtype=torch.bfloat16)
    tuning.choose_launches(model, EngineConfig(**config), lambda *_: None)


def test_an_engine_uses_the_times(used: list[Any]) -> None:
    choose()
    assert used == [TIMES]


def test_every_rank_uses_those_of_rank_0(used: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "of_first", lambda times: {"rank 0": times})
    choose()
    assert used == [{"rank 0": TIMES}]


def test_with_batch_invariant_times_choose_nothing(used: list[Any]) -> None:
    choose(batch_invariant=True)
    assert used == [{}]


def test_on_a_cpu_nothing_happens(used: list[Any]) -> None:
    choose("cpu")
    assert used == []


def test_an_engine_starts_if_measuring_fails(used: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(tune, "tuned", fail)
    choose()
    assert used == [{}]


def share(membership: exchange.Membership) -> dict[str, dict[int, float]]:
    exchange.join(membership, torch.device("cpu"))
    shared = exchange.of_first({"times of rank": {membership.rank: 1.5}})
    exchange.leave()
    return shared


def test_ranks_share_what_rank_0_has(tmp_path: Path) -> None:
    members = [exchange.Membership(rank, 2, str(tmp_path / "store")) for rank in (0, 1)]
    with multiprocessing.get_context("fork").Pool(2) as ranks:
        assert ranks.map_async(share, members, chunksize=1).get(120) == [{"times of rank": {0: 1.5}}] * 2
