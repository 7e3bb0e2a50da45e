"""The kernels' own clock, against torch.profiler and inside CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nf4_kernels import cuda
from nf4_kernels.cuda import device_clock
from nf4_kernels.cuda.device import capability
from nf4_kernels.cuda.device_clock import KINDS, DeviceClock
from nf4_kernels.plan import Dequantize, Mma, Plan, Rows, Wgmma
from nf4_kernels.timing import reader_of
from tests.nf4_kernels.cuda.cuda_weights import Random, random_weight

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
N, K = 12800, 5120
_KINDS: dict[type[Plan], str] = {Rows: "rows", Mma: "rows", Wgmma: "wgmma", Dequantize: "slices"}
"""What the time of a launch counts as."""
REPEATS = 20


@pytest.fixture
def clock() -> Iterator[DeviceClock]:
    yield cuda.start_clock(DEVICE)
    cuda.stop_clock(DEVICE)


def seconds(clock: DeviceClock) -> dict[str, float]:
    clock.collect()
    clock.note(clock.totals)
    return clock.seconds()


def layers(weights: list[Random], x: torch.Tensor) -> torch.Tensor:
    """GEMMs as a model has them: with an elementwise kernel between any two."""
    for w in weights:
        x = w.linear(x)[:, :K] * 1e-3
    return x


@pytest.mark.parametrize("m", [1, 8, 32, 64, 256, 2048])
def test_times_are_those_of_the_profiler(m: int, clock: DeviceClock) -> None:
    kind = _KINDS[type(cuda.plan_on(DEVICE, m, N, K))]
    weights = [random_weight(N, K) for _ in range(4)]
    x = torch.randn(m, K, device=DEVICE, dtype=torch.bfloat16)
    layers(weights, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    seconds(clock)
    with torch.cuda.graph(graph):
        for _ in range(4):
            layers(weights, x)
        clock.collect()
    for _ in range(10):
        graph.replay()
    before = seconds(clock)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPEATS):
            graph.replay()
        torch.cuda.synchronize()
    found = {name: value - before[name] for name, value in seconds(clock).items()}
    foreign = ("stamp", "collect", "elementwise", "Memcpy", "Memset")
    events = [
        e for e in profiled.events() if e.device_type.name == "CUDA" and not any(name in e.name for name in foreign)
    ]
    # A launch that does not begin early (PDL) takes the profiler so long before its first instruction and behind its last.
    idle = 0.0 if capability(DEVICE) >= (9, 0) else 1.2e-6
    launches = REPEATS * 16
    expected = sum(e.device_time_total for e in events) * 1e-6 - launches * idle
    assert expected > 0
    print(f"M = {m}: {found[kind] / launches * 1e6:.2f} us a GEMM, the profiler's {expected / launches * 1e6:.2f}")
    assert found[kind] == pytest.approx(expected, rel=0.05)
    if kind == "slices":
        own = [e.device_time_total * 1e-6 - idle for e in events if "dequantize" in e.name]
        assert found["dequantize"] == pytest.approx(sum(own), rel=0.05)
    assert all(found[name] == 0 for name in KINDS if name not in (kind, "dequantize" if kind == "slices" else kind))


@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 128, 256])
def test_launches_that_time_their_decoding_give_the_same_bits(
    m: int, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = random_weight(N, K)
    x = torch.randn(m, K, device=DEVICE, dtype=torch.bfloat16)
    expected = w.linear(x)
    monkeypatch.setattr(device_clock, "SAMPLING", 1)
    before, decoding = seconds(clock), sum(clock.decoding().values())
    for _ in range(REPEATS):
        assert torch.equal(w.linear(x), expected)
    whole = sum(seconds(clock).values()) - sum(before.values())
    share = (sum(clock.decoding().values()) - decoding) / whole
    print(f"M = {m}: {share:.2f} of {whole / REPEATS * 1e6:.1f} us")
    # Others do not time theirs.
    assert 0.05 < share < 0.8 if isinstance(cuda.plan_on(DEVICE, m, N, K), Rows | Wgmma) else share == 0


@pytest.mark.parametrize("m", [8, 128])
@pytest.mark.parametrize("normalises", [True, False], ids=["norm", "float16"])
def test_launches_that_do_not_time_their_decoding(
    normalises: bool, m: int, clock: DeviceClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    w, dtype = random_weight(N, K), torch.bfloat16 if normalises else torch.float16
    x = torch.randn(m, K, device=DEVICE, dtype=dtype)
    norm = torch.randn(K, device=DEVICE, dtype=dtype) if normalises else None
    monkeypatch.setattr(device_clock, "SAMPLING", 1)
    cuda.fused_linear(x, w.weight, None, None, norm, 1e-6)
    assert sum(seconds(clock).values()) > 0
    assert sum(clock.decoding().values()) == 0


def test_one_launch_in_so_many_times_its_decoding(clock: DeviceClock) -> None:
    timed = [clock.take("rows")[1] for _ in range(3 * device_clock.SAMPLING)]
    assert sum(timed) == 3
    assert not any(clock.take("dequantize")[1] for _ in range(3 * device_clock.SAMPLING))


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
    w.linear(x)  # a launch of its own, beside the graph's
    once = sum(seconds(clock).values()) - before
    for _ in range(10):
        graph.replay()
    often = sum(seconds(clock).values()) - before - once
    assert 5e-6 * 4 < once < 1e-3
    assert often == pytest.approx(10 * once * 4 / 5, rel=0.3)
    times = reader_of(clock)()
    assert 0 <= times.dequant < 0.8 * times.linear
    linear = sum(value for name, value in times.by_kernel.items() if not name.endswith("dequantize"))
    assert times.linear == pytest.approx(linear)


def test_launches_beyond_its_room_go_uncounted(
    clock: DeviceClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_clock, "CAPACITY", 3)
    assert all(clock.take("rows")[0] is not None for _ in range(3))
    assert [clock.take("rows")[0] for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
    clock.collect()
    assert clock.take("rows")[0] is not None
