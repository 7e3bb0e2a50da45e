"""An engine without a model, as the API process starts it: tokens come at a given rate for as many requests as ask.

Started in place of server.engine.loop: its input begins with an EngineSetup, its messages are the real engine's.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass

import msgspec

from server.engine.channel import Channel
from server.engine.supervisor.process import EngineSetup
from server.types import (
    AbortRequest,
    EngineReady,
    EngineStats,
    GenerateRequest,
    RemoveClient,
    RequestOutput,
    RequestTimings,
    Shutdown,
    StepOutputs,
    ToEngine,
)

MOST_SEQUENCES = 256
VARIABLE = "BENCH_TOKENS_PER_S"
# Ids of ordinary words in the embedded model's vocabulary.
TOKENS = range(1000, 8000)


@dataclass
class _Sequence:
    request: GenerateRequest
    left: int


class StubEngine:
    """One token for every sequence in each step, and as many steps a second as MOST_SEQUENCES of them take."""

    def __init__(self, channel: Channel, tokens_per_s: float) -> None:
        self._channel = channel
        self._step_s = MOST_SEQUENCES / tokens_per_s
        self._sequences: dict[str, _Sequence] = {}
        self._rng = random.Random(0)
        self.ended = False

    def run(self) -> None:
        """Step until the API process says that it ends."""
        due = time.monotonic()
        while not self.ended:
            now = time.monotonic()
            if not self._sequences:
                due = now
            wait_ms = 100 if not self._sequences else max(0, int(1000 * (due - now)))
            for message in self._channel.receive(wait_ms):
                self._take(message)
            if self._sequences and time.monotonic() >= due:
                due += self._step_s
                self._step()

    def _take(self, message: ToEngine) -> None:
        match message:
            case GenerateRequest(request_id=name, sampling=sampling):
                self._sequences[name] = _Sequence(message, sampling.max_tokens)
            case AbortRequest(names):
                for name in names:
                    self._sequences.pop(name, None)
            case RemoveClient(client):
                for name in self._channel.remove_client(client):
                    self._sequences.pop(name, None)
            case Shutdown():
                self.ended = True

    def _step(self) -> None:
        outputs = []
        for name, sequence in list(self._sequences.items())[:MOST_SEQUENCES]:
            sequence.left -= 1
            reason = None if sequence.left else "length"
            timings = RequestTimings(0.001, 0.01, 0.1, 0.001, 0.01, 0.001, 0.01)
            outputs.append(
                RequestOutput(name, [self._rng.choice(TOKENS)], "length" if reason else None, timings=timings)
            )
            if reason:
                del self._sequences[name]
        count = len(outputs)
        stats = EngineStats(
            running=len(self._sequences), step_seconds=self._step_s, step_tokens=count, step_batch=count
        )
        self._channel.send_step(StepOutputs(outputs, stats))


def main() -> None:
    """See the module."""
    setup = msgspec.json.decode(input(), type=EngineSetup)
    channel = Channel(setup)

    def until_input_ends() -> None:
        while os.read(0, 4096):
            pass
        os._exit(0)

    threading.Thread(target=until_input_ends, daemon=True).start()
    channel.send(EngineReady(8192, 49152, [2], 16, 100_000, "stub", "none", "none"))
    StubEngine(channel, float(os.environ[VARIABLE])).run()
    channel.close()


if __name__ == "__main__":
    main()
