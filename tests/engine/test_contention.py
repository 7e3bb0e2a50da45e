"""When OpenMP's threads sleep at barriers, and that they do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from nf4_kernels import cpu
from server.config import EngineConfig
from server.engine.contention import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    MAX_SLEEP_S,
    Barriers,
    free_cores,
    waited_seconds,
)
from server.engine.start import load_runner
from tests.engine.models import tiny_model


class Machine:
    """A clock, and how long a thread waits for a core in every second."""

    def __init__(self) -> None:
        self.time = 100.0
        self.waiting_share = 0.0
        self._waited = 5.0
        self.sleeps: list[bool] = []
        self.free_cores = 64
        self.barriers = Barriers(
            self.sleeps.append, lambda: {1: self._waited, 2: 0.0}, lambda: self.time, lambda: self.free_cores
        )

    def run(self, seconds: float, waiting_share: float, step_s: float = 0.02) -> None:
        """Run steps."""
        for _ in range(round(seconds / step_s)):
            self.time += step_s
            self._waited += waiting_share * step_s
            self.barriers.check()


def test_threads_sleep_while_they_wait_for_cores() -> None:
    machine = Machine()
    machine.run(30, 0.02)
    assert machine.sleeps == []
    machine.run(0.6, 0.5)
    assert machine.sleeps == [True]
    machine.run(MAX_SLEEP_S - 1, 0.5)
    assert machine.sleeps == [True]
    machine.run(FIRST_PAUSE_S + 1, 0.0)
    assert machine.sleeps == [True, False]
    machine.run(30, 0.02)
    assert machine.sleeps == [True, False]


def test_spinning_is_tried_less_and_less_often_while_it_is_wrong() -> None:
    """Threads that sleep wait for little, and those that spin for much."""
    machine, changed = Machine(), []
    for _ in range(30_000):
        before = len(machine.sleeps)
        machine.run(0.02, 0.05 if machine.barriers.sleeps else 0.5)
        if len(machine.sleeps) > before:
            changed.append(machine.time)
    slept = [end - begin for begin, end in zip(changed[::2], changed[1::2], strict=False)]
    assert slept[:5] == pytest.approx([1, 2, 4, 8, 16], abs=0.6)
    assert max(slept) < MAX_PAUSE_S + 1
    spun = [end - begin for begin, end in zip(changed[1::2], changed[2::2], strict=False)]
    assert sum(spun) < 0.05 * sum(slept)


def test_spinning_is_not_tried_while_the_cores_are_busy() -> None:
    """Threads that sleep wait for little then, too."""
    machine = Machine()
    machine.free_cores = 0
    machine.run(0.6, 0.5)
    machine.run(MAX_SLEEP_S - 1, 0.05)
    assert machine.sleeps == [True]
    machine.free_cores = 64
    machine.run(FIRST_PAUSE_S + 0.5, 0.05)
    assert machine.sleeps == [True, False]


def test_threads_sleep_in_the_first_step_on_a_very_busy_machine() -> None:
    machine = Machine()
    machine.run(1, 0.0)
    machine.time += 100  # no step meanwhile
    machine.free_cores = -1
    machine.barriers.check()
    assert machine.sleeps == [True]
    machine.free_cores = 64
    machine.run(FIRST_PAUSE_S + 0.5, 0.0)
    assert machine.sleeps == [True, False]


@pytest.mark.skipif(not waited_seconds(), reason="the system does not say what runs")
def test_processes_that_compute_leave_no_core_free() -> None:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range((os.cpu_count() or 1) + 1)]
    try:
        deadline = time.monotonic() + 60
        while free_cores() >= 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_slow_steps_do_not_take_much_of_the_time() -> None:
    """If the cores are busy a step with spinning threads takes seconds, and nothing can be changed within it."""
    machine, spun = Machine(), 0.0
    begin = machine.time
    while machine.time < begin + 30:
        sleeps, before = machine.barriers.sleeps, machine.time
        machine.run(0.1 if sleeps else 1.4, 0.05 if sleeps else 0.9, step_s=0.1 if sleeps else 1.4)
        spun += 0.0 if sleeps else machine.time - before
    assert spun < 0.15 * (machine.time - begin)


def test_one_slow_step_is_enough() -> None:
    machine = Machine()
    machine.run(1, 0.0)
    machine.run(5, 0.9, step_s=2.5)
    assert machine.sleeps[0] is True


def test_threads_sleep_in_the_steps_of_a_start_but_not_while_steps_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: list[bool] = []
    monkeypatch.setattr(cpu, "sleep_at_barriers", changes.append)
    tiny_model("llama").save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", kv_cache_bytes=2**20, speculation="lookup")
    load_runner(tmp_path, config, lambda *_: None)
    assert changes == [True, False, True, False]


def test_it_is_for_threads_on_cpu_only() -> None:
    assert Barriers.checker("cuda").__name__ == "<lambda>"
    torch.set_num_threads(1)
    assert Barriers.checker("cpu").__name__ == "<lambda>"


@pytest.mark.skipif(not waited_seconds(), reason="the system does not say what threads wait for")
def test_a_thread_that_had_no_core_has_waited() -> None:
    """Two threads of one core take turns."""
    cores = os.sched_getaffinity(0)
    child = os.fork()
    if not child:
        os.sched_setaffinity(0, {min(cores)})
        if os.fork():
            until = time.monotonic() + 0.5
            while time.monotonic() < until:
                pass
            os._exit(0 if sum(waited_seconds().values()) > 0.02 else 1)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_sleeping_threads_compute_the_same_and_their_helpers_go() -> None:
    before = len(os.listdir("/proc/self/task"))
    torch.set_num_threads(2)
    x, w, bias = torch.randn(3, 256), torch.randn(512, 256).bfloat16(), torch.randn(512)
    expected = cpu.linear_bf16w(x, w, bias)
    started = len(os.listdir("/proc/self/task"))
    for _ in range(3):
        cpu.sleep_at_barriers(True)
        cpu.sleep_at_barriers(True)
        torch.testing.assert_close(cpu.linear_bf16w(x, w, bias), expected, rtol=0, atol=0)
        cpu.sleep_at_barriers(False)
    deadline = time.monotonic() + 60
    while len(os.listdir("/proc/self/task")) > started:
        assert time.monotonic() < deadline, (before, started)
        time.sleep(0.01)
