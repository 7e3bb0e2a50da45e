"""nf4-server fits: a start's memory plan, by headers of weight files alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from server import command_line, fits
from server.engine import planning
from server.engine.planning import plan_start


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_it_says_what_a_start_on_that_gpu_says(
    embedded_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--gpu-memory", "8GiB", "--max-num-seqs", "4", "--max-model-len", "1024"]
    assert command_line.main(["fits", str(embedded_folder), *options]) == 0
    said = capsys.readouterr().out
    memory = fits.idle(8 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory.free, memory.total))
    monkeypatch.setattr(planning, "reserve", lambda *_: memory.reserve)
    config = command_line._configuration([str(embedded_folder), *options[2:]])
    start = plan_start(embedded_folder, config.engine, torch.device("cuda", 0))
    assert start.plan is not None
    assert f"a GPU of 8 GiB; {start.plan.table()}\nIt fits. A request may have up to 1,024 tokens" in said
    assert said.endswith(f"{start.advice}\n")


def test_what_does_not_fit_is_said_with_the_options_that_help(
    embedded_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line.main(["fits", str(embedded_folder), "--gpu-memory=1.05g"]) == 1
    said = capsys.readouterr().out
    assert "It does not fit: 0.11 GiB are missing for 4,096 tokens in the KV cache.\noptions that free memory: " in said
    assert said.endswith("\nWith all of these it fits: 8,160 tokens.\n")
    assert command_line.main(["fits", str(embedded_folder), "--gpu-memory=0.9GiB"]) == 1
    assert capsys.readouterr().out.endswith("With all of these it does not fit either.\n")


def test_without_a_gpu_it_compares_sizes(embedded_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["fits", str(embedded_folder), "--max-num-batched-tokens", "1000000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [str(size) for size in fits.SIZES]
    assert lines[1].endswith("does not fit")
    assert not lines[-2].endswith("does not fit")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--gpu-memory", "twelve"], "error: --gpu-memory: 'twelve' is no size such as 12GiB"),
        (["/nowhere"], "error: /nowhere: no such folder"),
        (["--max-model-len", "x"], "error: --max-model-len: engine.max_model_len: "),
    ],
)
def test_what_is_wrong_is_named(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["fits", *arguments]) == 1
    assert capsys.readouterr().err.startswith(error)
