"""Async scheduling: steps launched before the last one's tokens are read give the same answers, whatever happens between."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.batch import Batch, build_batch
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.inverse_cdf import sample_by_inversion
from server.engine.runtime.sampling.sampler import Sampled, is_sampled_from_raw_logits
from server.engine.scheduling.scheduler import Step
from server.engine.scheduling.sequence import PLACEHOLDER
from server.types import RequestOutput
from tests.engine.factories import make_request
from tests.engine.models import VOCABULARY, tiny_model

CONFIG = EngineConfig(block_size=4, kv_cache_bytes=2**20, max_num_batched_tokens=32, max_num_seqs=6, enforce_eager=True)
MODEL = tiny_model("llama")


@dataclass
class PendingStep:
    """Stands for a step on a device: the next step sees its tokens, and the host only by read()."""

    step: Step
    tokens: list[int]

    def read(self) -> list[Sampled]:
        return [Sampled(token) for token in self.tokens]


class AsyncRunner(ModelRunner):
    """Launches every decode step of raw logits, as a GPU's runner does; launched counts them."""

    launched = 0

    @torch.inference_mode()
    def execute_async(self, step: Step, previous: Any) -> Any:
        if not all(c.samples and c.length == 1 and is_sampled_from_raw_logits(c.sequence) for c in step.chunks):
            return None
        batch = build_batch(step, self._paged.block_size, self.device)
        if previous is not None:
            tokens = {id(c.sequence): t for c, t in zip(previous.step.sampled, previous.tokens, strict=True)}
            ids = [
                tokens[id(c.sequence)] if i == PLACEHOLDER else i
                for c, i in zip(step.chunks, batch.ids.tolist(), strict=True)
            ]
            batch = Batch(torch.tensor(ids), *(getattr(batch, n) for n in list(Batch.__dataclass_fields__)[1:]))
        assert PLACEHOLDER not in batch.ids.tolist()
        self.launched += 1
        logits = self._paged.run(batch)
        sequences = [c.sequence for c in step.chunks]
        return PendingStep(step, sample_by_inversion(logits, sequences, logits.argmax(-1)).tolist())


def make_engine(kind: type[ModelRunner], **changes: Any) -> tuple[Engine, Any]:
    config = CONFIG.model_copy(update=changes)
    plain = build_runner(copy.deepcopy(MODEL), config)
    runner = kind(plain._paged, plain.limits)
    return Engine(runner, config), runner


REQUESTS: list[dict[str, Any]] = [
    {"prompt": 9, "max_tokens": 20},
    {"prompt": 30, "max_tokens": 1},
    {"prompt": 3, "max_tokens": 30},
    {"prompt": 17, "max_tokens": 25},
    {"prompt": 40, "max_tokens": 2},
    {"prompt": 12, "max_tokens": 6, "temperature": 1.0, "seed": 4},
    {"prompt": 5, "max_tokens": 33, "temperature": 0.9, "top_p": 0.8, "seed": 5},
    {"prompt": 21, "max_tokens": 28},
]


def run(engine: Engine, requests: list[Any], aborts: dict[int, str] | None = None) -> dict[str, list[RequestOutput]]:
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.add(request)
    steps = 0
    while engine.has_work:
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
        steps += 1
        if aborts and steps in aborts:
            engine.abort([aborts[steps]])
        assert steps < 1000
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


# 30 blocks hold three or so of the requests, so sequences are preempted while their tokens are unread.
@pytest.mark.parametrize("blocks", [None, 30])
@pytest.mark.parametrize("stop", [False, True])
def test_async_scheduling_changes_no_answer(blocks: int | None, stop: bool) -> None:
    plain, _ = make_engine(ModelRunner)
    requests = [make_request(**o) for o in REQUESTS]
    expected = run(plain, requests)
    if stop:
        # Stop each request at a token that it is known to generate, so that a step more is under way when it ends.
        for options, request in zip(REQUESTS, requests, strict=True):
            generated = tokens(expected[request.request_id])
            options_stop = (generated[len(generated) // 2],)
            requests[requests.index(request)] = make_request(**{**options, "stop_token_ids": options_stop})
        expected = run(make_engine(ModelRunner)[0], requests)
    changes = {} if blocks is None else {"kv_cache_bytes": blocks * 768 * 4, "max_model_len": 100}
    engine, runner = make_engine(AsyncRunner, **changes)
    got = run(engine, requests)
    for request in requests:
        assert tokens(got[request.request_id]) == tokens(expected[request.request_id])
        assert [o.finish_reason for o in got[request.request_id]][-1] is not None
    assert engine.stats().kv_blocks_used == 0
    assert engine.stats().preemptions > 0 or blocks is None or stop
    assert runner.launched > 5


def test_aborted_requests_get_nothing_more_and_the_others_everything() -> None:
    rng = random.Random(0)
    requests = [make_request(**o) for o in REQUESTS]
    expected = run(make_engine(ModelRunner)[0], requests)
    for _ in range(10):
        engine, _runner = make_engine(AsyncRunner)
        aborted = {rng.randrange(1, 30): rng.choice(requests).request_id for _ in range(3)}
        got = run(engine, requests, aborted)
        for request in requests:
            mine, theirs = tokens(got[request.request_id]), tokens(expected[request.request_id])
            assert mine == (theirs[: len(mine)] if request.request_id in aborted.values() else theirs)
        assert engine.stats().kv_blocks_used == 0
        assert not engine.has_work


def test_the_placeholder_is_no_token() -> None:
    assert PLACEHOLDER not in range(VOCABULARY)
