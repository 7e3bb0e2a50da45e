"""Launches chosen by measured times: the choice, and what is kept of the times. Timers are planted ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nf4_kernels import Weight, build, cuda, tune
from nf4_kernels.cuda import launches
from nf4_kernels.plan import Dequantize, Mma, Plan, Rows, Wgmma, candidates, plan
from nf4_kernels.plan.measured import TOKENS, Times, measured_choice, shape_name, shortlist

N, K = 4096, 14336
SHAPE = shape_name(N, K, 64, True)
GPU = torch.device("cuda", 0)


def options(m: int, arch: int = 86) -> Iterator[tuple[Plan, float]]:
    return candidates(m, N, K, arch, 82)


def planted(slower: dict[type, float], arch: int = 86) -> Times:
    """Times of what is timed: the fitted cost, times how much slower a kernel is on this GPU."""
    costs = {tokens: dict(options(tokens, arch)) for tokens in TOKENS}
    return {
        tokens: {str(one): own[one] * slower.get(type(one), 1.0) for one in shortlist(own.items())}
        for tokens, own in costs.items()
        if len(own) > 1
    }


@pytest.mark.parametrize("arch", [80, 86, 90, 120])
def test_times_as_fitted_change_no_choice(arch: int) -> None:
    for m in (1, 5, 8, 12, 20, 33, 50, 100, 128, 129, 200, 300, 700, 1024, 2000):
        chosen = measured_choice(m, planted({}, arch), partial(options, arch=arch))
        assert chosen == plan(m, N, K, arch, 82)


def test_a_kernel_that_is_slow_here_is_not_chosen_with_any_number_of_tokens() -> None:
    for m in range(1, 129):
        assert isinstance(measured_choice(m, planted({Mma: 9.0}), options), Dequantize)
        assert isinstance(measured_choice(m, planted({Mma: 0.1}), options), Mma)
        slow = planted({Rows: 9.0, Dequantize: 9.0}, 90)
        assert isinstance(measured_choice(m, slow, partial(options, arch=90)), Wgmma) or m <= 8


def test_no_choice_was_measured_to_be_slower_than_dequantization() -> None:
    for slower in (0.5, 0.9, 0.98, 0.995, 1.0, 1.01, 1.1, 2.0):
        times = planted({Dequantize: slower})
        for m in times:
            row = times[m]
            assert row[str(measured_choice(m, times, options))] <= row[str(Dequantize(N))]


def test_what_is_not_clearly_faster_changes_nothing() -> None:
    fitted = plan(8, N, K, 90, 82)
    other = next(one for one in shortlist(options(8, 90)) if one != fitted)
    for share, expected in ((0.99, fitted), (0.9, other)):
        row = dict.fromkeys(map(str, shortlist(options(8, 90))), 99.0) | {str(fitted): 30.0, str(other): 30.0 * share}
        assert measured_choice(8, {8: row}, partial(options, arch=90)) == expected


def test_what_was_not_measured_is_left_to_the_fitted_costs() -> None:
    """No times at all; none of so many tokens; those of launches that this version does not have."""
    for times in ({}, {8: {str(Dequantize(N)): 1.0}}, {64: {"a launch of another version": 1.0}}):
        assert measured_choice(20, times, options) == plan(20, N, K, 86, 82)


def test_choices_on_a_device_follow_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_properties", lambda index: (86, 82))
    fitted = cuda.plan_on(GPU, 20, N, K)
    launches.use_times(GPU, {SHAPE: planted({Mma: 9.0})})
    assert isinstance(cuda.plan_on(GPU, 20, N, K), Dequantize)
    assert cuda.plan_on(GPU, 20, N, K, nested=False) == plan(20, N, K, 86, 82, nested=False)
    assert cuda.plan_on(torch.device("cuda", 1), 20, N, K) == fitted
    launches.use_times(GPU, {})
    assert cuda.plan_on(GPU, 20, N, K) == fitted


def test_a_gated_gemm_is_chosen_among_launches_that_compute_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_properties", lambda index: (100, 82))
    launches.use_times(GPU, {SHAPE: planted({Mma: 1.5}, 100)})
    choices = [cuda.plan_on(GPU, 8, N, K, gated=gated) for gated in (False, True)]
    assert [type(choice) for choice in choices] == [Rows, Mma]
    monkeypatch.setattr(launches, "_properties", lambda index: (90, 82))
    launches.use_times(GPU, {})
    assert isinstance(cuda.plan_on(GPU, 8, N, K, normalised=True, gated=True), Rows)
    assert isinstance(cuda.plan_on(GPU, 4000, N, K, gated=True), Dequantize)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A machine with a GPU whose times are planted; the shapes that are measured."""
    measured: list[str] = []

    def measure(weights: list[str], dtype: torch.dtype) -> Times:
        measured.extend(weights)
        return {8: {"a launch": 2.5, "another": 3.5}}

    properties = SimpleNamespace(name="NVIDIA GeForce RTX 3090", multi_processor_count=82)
    for where, name, value in (
        (cuda, "load_error", lambda: None),
        (tune, "measure", measure),
        (tune, "arch", lambda device: 86),
        (tune, "_driver", lambda: 13000),
        (torch.cuda, "get_device_properties", lambda index: properties),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "empty_cache", lambda: None),
    ):
        monkeypatch.setattr(where, name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NF4_TUNE", "on")
    yield measured
    launches.use_times(GPU, {})


def tuned(*shapes: str, **more: Any) -> dict[str, Times]:
    weights: Any = {shape: [shape] for shape in shapes}
    return tune.tuned(weights, torch.bfloat16, lambda *_: None, **more)


def test_times_are_kept_for_the_next_start(gpu: list[str]) -> None:
    first = tuned("a", "b")
    assert tuned("b", "a") == first
    assert list(tuned("c")) == ["c"]
    assert gpu == ["a", "b", "c"]
    assert set(tune.kept()) == {"a", "b", "c"}
    tune.use_kept()
    assert launches._times[0] == tune.kept()


def test_times_of_another_driver_gpu_or_version_are_not_found(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tuned("a")
    for where, name, value in (
        (tune, "_driver", lambda: 13010),
        (build, "sources_digest", lambda: "another"),
        (tune, "arch", lambda device: 80),
        (torch.cuda, "get_device_properties", lambda index: SimpleNamespace(name="A100", multi_processor_count=82)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, value)
            assert tune.kept() == {}
    assert set(tune.kept()) == {"a"}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"shapes": 1}', '{"shapes": {"a": {"x": {}}}}', '{"shapes": {"a": {"1": 2}}}']
)
def test_a_file_that_cannot_be_read_is_measured_again(gpu: list[str], text: str) -> None:
    tuned("a")
    tune._file().write_text(text)
    assert set(tuned("a")) == {"a"}
    assert gpu == ["a", "a"]
    assert set(tune.kept()) == {"a"}


def test_where_nothing_can_be_kept_the_times_still_count(
    gpu: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "nf4-kernels").write_text("in the place of the folder")
    assert set(tuned("a")) == {"a"}
    assert "not kept" in caplog.text
    assert set(tuned("a")) == {"a"}
    assert gpu == ["a", "a"]


def test_shapes_that_there_is_no_time_for_are_measured_the_next_time(gpu: list[str]) -> None:
    assert tuned("a", "b", budget_s=-1.0) == {}
    assert gpu == []
    assert set(tuned("a", "b")) == {"a", "b"}


def test_shapes_that_find_no_memory_are_left_out(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    measure = tune.measure

    def full(weights: Any, dtype: torch.dtype) -> Times:
        if weights == ["b"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return measure(weights, dtype)

    monkeypatch.setattr(tune, "measure", full)
    assert set(tuned("a", "b", "c")) == set(tune.kept()) == {"a", "c"}


@pytest.mark.parametrize("value", ["OFF", " off"])
def test_what_is_asked_for_is_read_in_any_case(gpu: list[str], monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    tuned("a")
    monkeypatch.setenv("NF4_TUNE", value)
    assert tune.kept() == {}


def test_another_wish_is_named(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NF4_TUNE", "1")
    assert tuned("a") == {}
    assert "NF4_TUNE is '1'" in caplog.text


def test_nothing_is_measured_or_read_where_that_is_off(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    tuned("a")
    monkeypatch.setenv("NF4_TUNE", "off")
    assert tuned("a", "b") == tune.kept() == {}
    assert gpu == ["a"]


def test_with_wgmma_fitted_costs_choose(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "arch", lambda device: 90)
    assert tuned("a") == tune.kept() == {}
    assert not gpu


def test_a_start_measures_only_if_asked_to(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = tuned("a")
    monkeypatch.delenv("NF4_TUNE")
    assert tuned("a", "b") == first
    assert gpu == ["a"]


def test_weights_that_are_not_on_a_gpu_are_left_out() -> None:
    weight = Weight(torch.zeros(64 * 32, dtype=torch.uint8), (64, 64), torch.ones(64), 64)
    assert tune.by_shape([weight]) == {}


def test_every_launch_that_is_timed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "_properties", lambda index: (90, 132))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 20))
    monkeypatch.setattr(tune, "microseconds", lambda runs: [float(index + 1) for index in range(len(runs))])
    weight = Weight(torch.zeros(N * K // 2, dtype=torch.uint8), (N, K), torch.ones(N * K // 64), 64)
    times = tune.measure([weight], torch.bfloat16)
    assert list(times) == list(TOKENS)
    for tokens, row in times.items():
        assert list(row) == [str(one) for one in shortlist(candidates(tokens, N, K, 90, 132, nested=False))]
        assert len(row) <= 9
        assert str(Dequantize(N)) in row


@pytest.mark.gpu
def test_launches_are_timed_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("NF4_TUNE", "on")
    monkeypatch.setattr(tune, "arch", lambda device: 86)  # so that a GPU with wgmma measures, too
    weights = [tune._random(2048, 1024, 64, True) for _ in range(3)]
    times = tune.tuned(tune.by_shape(weights), torch.bfloat16, lambda *_: None)
    assert tune.kept() == times
    own = times[shape_name(2048, 1024, 64, True)]
    assert own
    assert all(0.5 < us < 5000 for row in own.values() for us in row.values())
    launches.use_times(GPU, times)
    x = torch.randn(20, 1024, device="cuda", dtype=torch.bfloat16)
    expected = x.float() @ cuda.dequantize(weights[0], torch.float32).T
    assert (cuda.linear(x, weights[0]).float() - expected).norm() < 0.01 * expected.norm()
    launches.use_times(GPU, {})
