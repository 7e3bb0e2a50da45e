"""The kernels' own clock, against torch.profiler and inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nf4_kernels import cuda, device_clock
from nf4_kernels.device_clock import KINDS, DeviceClock
from nf4_kernels.timing import reader_of
from tests.nf4_kernels.test_cuda import random_weight

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

DEVICE = torch.device("cuda", 0)
N, K = 12800, 5120
REPEATS = 50


@pytest.fixture
def clock() -> Iterator[DeviceClock]:
    yield cuda.start_clock(DEVICE)
    cuda.stop_clock(DEVICE)


def seconds(clock: DeviceClock) -> dict[str, float]:
    clock.collect()
    clock.note(clock.totals)
    return clock.seconds()


@pytest.mark.parametrize(("m", "kind"), [(1, "rows"), (8, "rows"), (64, "wgmma"), (2048, "slices")])
def test_times_are_those_of_the_profiler(m: int, kind: str, clock: DeviceClock) -> None:
    w = random_weight(N, K)
    x = torch.randn(m, K, device=DEVICE, dtype=torch.bfloat16)
    for _ in range(5):
        w.linear(x)
    torch.cuda.synchronize()
    before = seconds(clock)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPEATS):
            w.linear(x)
            torch.cuda.synchronize()
    found = {name: value - before[name] for name, value in seconds(clock).items()}
    events = [e for e in profiled.events() if e.device_type.name == "CUDA" and "stamp" not in e.name]
    expected = sum(e.device_time_total for e in events) * 1e-6
    assert expected > 0
    print(f"M = {m}: {found[kind] / REPEATS * 1e6:.1f} us a product, the profiler's {expected / REPEATS * 1e6:.1f}")
    assert found[kind] == pytest.approx(expected, rel=0.05 if kind == "slices" else 0.1)
    if kind == "slices":
        dequantize = sum(e.device_time_total for e in events if "dequantize" in e.name) * 1e-6
        assert found["dequantize"] == pytest.approx(dequantize, rel=0.1)
    assert all(found[name] == 0 for name in KINDS if name not in (kind, "dequantize" if kind == "slices" else kind))


@pytest.mark.parametrize("m", [1, 32])
def test_replays_of_a_graph_count_each_time(m: int, clock: DeviceClock) -> None:
    w = random_weight(N, K)
    x = torch.randn(m, K, device=DEVICE, dtype=torch.bfloat16)
    w.linear(x)
    seconds(clock)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            w.linear(x)
        clock.collect()
    before = sum(seconds(clock).values())
    graph.replay()
    w.linear(x)  # a pair that is nobody's, beside the graph's
    once = sum(seconds(clock).values()) - before
    for _ in range(10):
        graph.replay()
    often = sum(seconds(clock).values()) - before - once
    assert 5e-6 * 4 < once < 1e-3
    assert often == pytest.approx(10 * once * 4 / 5, rel=0.3)
    times = reader_of(clock)()
    assert times.dequant == 0
    assert times.linear == pytest.approx(sum(times.by_kernel.values()))


def test_launches_beyond_its_room_go_uncounted(
    clock: DeviceClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_clock, "CAPACITY", 3)
    assert all(clock.take("rows") is not None for _ in range(3))
    assert [clock.take("rows") for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    clock.collect()
    assert clock.take("rows") is not None
