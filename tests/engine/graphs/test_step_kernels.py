"""The launches between the graphs of two steps, in Triton's interpreter and on a GPU, against the host's own arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from server.engine.runtime.attention.graph_backend import HostLayout
from server.engine.runtime.transfers import kernels_in_use
from server.engine.runtime.transfers.host_results import HostResults
from server.engine.runtime.transfers.kernels_in_use import has_step_kernels, use_step_kernels
from server.engine.scheduling.sequence import PLACEHOLDER
from tests.engine.interpreted import run_interpreted

CASES = [(1, 1, 8, 0), (4, 3, 40, 5), (16, 16, 900, 1), (400, 333, 3001, 2500)]


def check_layout(size: int, count: int, numbers: int, changed: int, device: str) -> None:
    """A step of `count` tokens in a graph of `size`, a layout of so many numbers, and so many new blocks in tables."""
    from server.engine.runtime.transfers.step_kernels import lay_out

    rng = np.random.default_rng(size + changed)
    pin = device == "cuda"

    def pinned(array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if pin else tensor

    given = rng.integers(0, 1 << 40, (4, size))
    given[0] %= 1000
    given[3] = rng.integers(0, count, size)
    given[3, count:] = 1 << 50  # padding names no token
    unknown = rng.random(count) < 0.6
    given[0, :count][unknown] = PLACEHOLDER
    newest = torch.from_numpy(rng.integers(1000, 2000, count)).to(device)
    source = rng.integers(-(1 << 31), 1 << 31, numbers + 7).astype(np.int32)
    tables = torch.full((70, 50), -3, dtype=torch.int32, device=device)
    new = np.full((2, changed + 9), 1 << 40)
    new[0, :changed] = rng.permutation(3500)[:changed]
    new[1, :changed] = rng.integers(0, 1 << 31, changed)
    for follows in (True, False):
        written = torch.full((numbers + 3,), -5, dtype=torch.int32, device=device)
        tables.fill_(-3)
        layout = HostLayout(written, pinned(source), numbers, tables, pinned(new), changed)
        for own in (layout, None):
            inputs = torch.full((3, size), -7, device=device)
            lay_out(inputs, pinned(given), newest if follows else None, PLACEHOLDER, own)
            expected = given[:3].copy()
            if follows:
                expected[0, :count][unknown] = newest.cpu().numpy()[given[3, :count][unknown]]
            assert np.array_equal(inputs.cpu().numpy(), expected)
        assert np.array_equal(written.cpu().numpy(), [*source[:numbers], -5, -5, -5])
        places = np.full(3500, -3)
        places[new[0, :changed]] = new[1, :changed]
        assert np.array_equal(tables.cpu().numpy().ravel(), places)
        # Copies of the same layout leave the same.
        again = HostLayout(
            written.clone().fill_(-5), pinned(source), numbers, tables.clone().fill_(-3), pinned(new), changed
        )
        again.write()
        assert torch.equal(again.numbers, written)
        assert torch.equal(again.tables, tables)


def check_post(count: int, words: int, device: str) -> None:
    from server.engine.runtime.transfers.step_kernels import post

    pin = device == "cuda"
    best = torch.randn(count + 2, device=device)[:count]
    best[count // 2] = torch.nan
    tokens = torch.randint(1 << 24, (count,), device=device)
    copied = torch.full((2 * count + 3,), -1.0, pin_memory=pin)
    totals = torch.randint(1 << 60, (words // 2, 2), device=device) if words else None
    times = torch.full((words // 2, 2), -1, pin_memory=pin) if words else None
    own = post(best, tokens, copied, totals, times)
    if pin:
        torch.cuda.synchronize()
    assert torch.equal(own, tokens)
    assert own.data_ptr() != tokens.data_ptr()
    torch.testing.assert_close(copied[:count], best.cpu(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(copied[count : 2 * count].long(), tokens.cpu())
    assert copied[2 * count :].tolist() == [-1.0] * 3
    if times is not None and totals is not None:
        assert torch.equal(times, totals.cpu())


def check_all(device: str) -> None:
    for case in CASES:
        check_layout(*case, device)
    for count, words in ((1, 0), (5, 12), (1030, 12)):
        check_post(count, words, device)


def test_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    run_interpreted("from tests.engine.graphs.test_step_kernels import check_all; check_all('cpu')")


TRIAL = """
import torch
from server.engine.runtime.transfers import kernels_in_use, step_kernels
# There is no pinned memory without a GPU.
torch.Tensor.pin_memory = lambda tensor: tensor
kernels_in_use.use_step_kernels(torch.device("cpu"))
assert kernels_in_use._Tried.usable
post = step_kernels.post
step_kernels.post = lambda best, *others: post(best + 1, *others)
kernels_in_use.use_step_kernels(torch.device("cpu"))
assert not kernels_in_use._Tried.usable
"""


def test_kernels_that_write_something_else_are_not_used() -> None:
    pytest.importorskip("triton")
    run_interpreted(TRIAL)


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    check_all("cuda")
    use_step_kernels(torch.device("cuda", 0))
    assert has_step_kernels(torch.empty(0, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("usable", [True, False])
def test_results_of_many_steps_reach_the_host_in_order(usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels_in_use._Tried, "usable", usable)
    results, expected, posted = HostResults(), [], []
    best, tokens = torch.zeros(600, device="cuda"), torch.zeros(600, dtype=torch.int64, device="cuda")
    for step in range(40):
        count = 1 + step * 97 % 600
        tokens.fill_(step)
        best.fill_(-step)
        posted.append(results.post(best[:count], tokens[:count]))
        expected.append([-float(step)] * count + [float(step)] * count)
        if step:
            # The step before is read behind the launch of this one.
            assert posted[-2].wait().tolist() == expected[-2]
            assert set(posted[-2].tokens.tolist()) == {step - 1}
