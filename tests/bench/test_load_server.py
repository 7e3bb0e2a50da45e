"""The load tool beside the server's own histograms: what a client sees is what the server says, and the way between."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from bench.load.__main__ import main
from bench.load.client import Load, run_load
from bench.load.lengths import LogNormal
from bench.load.processes import run_in_processes
from bench.load.summary import summarize
from tests.conftest import RunningServer

MODEL = "smollm2-135m-instruct"
REQUESTS = 8
ANSWER = 12


def samples(server: RunningServer) -> dict[str, float]:
    """Every _sum, _count and _total of /metrics without labels but the model's."""
    text = httpx.get(f"{server.base_url}/metrics", trust_env=False).text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if set(sample.labels) == {"model_name"}
    }


def test_the_servers_histograms_agree(server: RunningServer) -> None:
    load = Load(server.base_url, MODEL, REQUESTS, 3, prompt_tokens=(20, 60), answer_tokens=(ANSWER, ANSWER))
    before = samples(server)
    answers = asyncio.run(run_load(load))
    after = samples(server)
    summary = summarize(answers)
    delta = {name: after[name] - before[name] for name in after}
    assert summary["completed"] == REQUESTS == delta["nf4_e2e_request_latency_seconds_count"]
    assert sum(a.completion_tokens for a in answers) == REQUESTS * ANSWER == delta["nf4_generation_tokens_total"]
    assert sum(a.prompt_tokens for a in answers) == delta["nf4_prompt_tokens_total"]
    # A client's clock begins before the server has the request and ends after the last event was sent.
    for ours, name in (("ttft_s", "nf4_time_to_first_token_seconds"), ("e2e_s", "nf4_e2e_request_latency_seconds")):
        assert summary[ours]["mean"] > delta[f"{name}_sum"] / delta[f"{name}_count"] - 0.005, name


@pytest.mark.parametrize("load", [{"concurrency": 3}, {"rate": 20.0}, {"rate": 20.0, "poisson": False}])
def test_several_processes_send_all_requests(server: RunningServer, load: dict[str, float]) -> None:
    before = samples(server)
    lengths = {"prompt_tokens": LogNormal(10, 0.5), "answer_tokens": (3, 3)}
    answers = run_in_processes(Load(server.base_url, MODEL, 7, **lengths, **load), 2)  # type: ignore[arg-type]
    after = samples(server)
    assert [answer.completion_tokens for answer in answers] == [3] * 7
    assert sorted(answer.sent for answer in answers) == [answer.sent for answer in answers]
    assert len({answer.prompt_tokens for answer in answers}) > 1
    assert after["nf4_prompt_tokens_total"] - before["nf4_prompt_tokens_total"] == sum(a.prompt_tokens for a in answers)


def test_a_process_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(RuntimeError, match="exit code 1"):
        run_in_processes(Load("http://127.0.0.1:9", MODEL, 4, 2), 2)


def test_the_command_writes_figures_and_a_picture(server: RunningServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    files = tmp_path / "load.json", tmp_path / "load.png"
    status = main(
        [
            *("--base-url", server.base_url, "--requests", "3", "--rate", "20", "--arrivals", "constant"),
            *("--prompt-tokens", "lognormal:20:0.5", "--answer-tokens", "3-5", "--ttft-slo", "60"),
            *("--json", str(files[0]), "--png", str(files[1])),
        ]
    )
    assert status == 0
    report = json.loads(files[0].read_text())
    assert report["completed"] == 3
    assert report["load"]["rate"] == 20
    assert report["goodput_per_s"] == report["requests_per_s"] > 0
    assert files[1].read_bytes().startswith(b"\x89PNG")
