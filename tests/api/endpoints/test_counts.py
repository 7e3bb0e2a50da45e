"""Counts of several API processes together."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from server.api.http.admission import Admission
from server.api.http.counts import CONNECTIONS, FIRST_KEY, SEQUENCES, TOKENS, Counts
from server.api.http.errors import ApiError

# Takes and gives back room a thousand times; at no time may all together have more than the limit.
ACQUIRING = """
import sys
from pathlib import Path
from server.api.http.admission import Admission
from server.api.http.counts import Counts
from server.api.http.errors import ApiError
admission = Admission(4, 100, Counts(2, 3, int(sys.argv[1]), Path(sys.argv[2])))
got = 0
print("ready", flush=True)
input()
while got < 1000:
    try:
        tickets = [admission.acquire(2)]
    except ApiError:
        continue
    got += 1
    assert admission.held <= 4, admission.held
    for ticket in tickets:
        ticket.release()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    Counts.create(tmp_path / "counts", keys=2, processes=3)
    return tmp_path / "counts"


def test_limits_are_those_of_all_processes(file: Path) -> None:
    first, second = (Admission(3, 100, Counts(2, 3, row, file)) for row in (0, 1))
    one, two = first.acquire(2), second.acquire(1)
    assert (first.held, second.held) == (3, 3)
    for admission in (first, second):
        with pytest.raises(ApiError) as refused:
            admission.acquire(1)
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
    one.hold_tokens(60)
    with pytest.raises(ApiError):
        two.hold_tokens(41)
    two.hold_tokens(40)
    one.release()
    one.release()
    assert (second.held, second.held_tokens) == (1, 40)
    second.acquire(2)


def test_a_process_that_has_ended_holds_nothing(file: Path) -> None:
    counts = [Counts(2, 3, row, file) for row in range(3)]
    for column in (SEQUENCES, TOKENS, CONNECTIONS, FIRST_KEY, FIRST_KEY + 1):
        for number, each in enumerate(counts, 1):
            each.add(column, number)
        assert {each.total(column) for each in counts} == {6}
    counts[0].clear(1)
    for column in (SEQUENCES, TOKENS, CONNECTIONS, FIRST_KEY, FIRST_KEY + 1):
        assert {each.total(column) for each in counts} == {4}


def test_ends_in_all_processes_tell_when_to_come_back(file: Path) -> None:
    counts = [Counts(2, 3, row, file) for row in range(3)]
    counts[0].ended(1)
    assert counts[2].seconds_per_end() is None
    counts[1].ended(1)
    both = counts[2].seconds_per_end()
    assert both is not None
    assert 0 < both < 5
    counts[1].ended(1000)
    many = counts[0].seconds_per_end()
    assert many is not None
    assert many < both + 1


def test_processes_that_compete_keep_to_the_limit(file: Path) -> None:
    command = [sys.executable, "-c", ACQUIRING]
    others = [
        subprocess.Popen([*command, str(row), str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for row in range(3)
    ]
    for other in others:
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
    for other in others:
        assert other.stdin is not None
        other.stdin.write("go\n")
        other.stdin.flush()
    assert [other.wait(60) for other in others] == [0, 0, 0]
    assert Counts(2, 3, 0, file).total(SEQUENCES) == 0


def test_the_lock_of_a_process_that_dies_is_free(file: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from server.api.http.counts import Counts\n"
        "with Counts(2, 3, 1, Path(sys.argv[1])).locked(): os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(file)], check=False).returncode == -9
    with Counts(2, 3, 0, file).locked():
        pass
