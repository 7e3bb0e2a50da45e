"""Sequences from outputs of the engine to deltas, with outputs that the real engine cannot be brought to give at will."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from server.api.answering.generation import Generation
from server.api.answering.sequence_run import Delta, SequenceRun
from server.api.answering.turn import Turn
from server.api.http.admission import Admission
from server.api.http.errors import ApiError
from server.api.openai.protocol import CompletionTokensDetails
from server.engine.supervisor.client import EngineClient, EngineStatus, EngineUnavailableError
from server.observability.metrics import Metrics
from server.observability.timeline import RequestTimeline
from server.text.answer import AnswerParser
from server.text.output import OutputText
from server.text.reasoning import MARKS, ReasoningSplitter
from server.text.tokenizer import Tokenizer
from server.types import GenerateRequest, RequestOutput, RequestTimings, SamplingParams, TokenLogprob


class ScriptedEngine:
    """Gives each request the outputs of a script; None in a script waits for ever."""

    def __init__(self, *scripts: list[RequestOutput | Exception | None]) -> None:
        self._scripts = list(scripts)
        self.closed: list[str] = []
        self.status = EngineStatus("ready")
        self.waited = 0

    async def wait_ready(self) -> None:
        self.waited += 1
        self.status = EngineStatus("ready")

    async def abort(self, request_ids: list[str]) -> None:
        self.aborted.set()

    @property
    def aborted(self) -> asyncio.Event:
        self.__dict__.setdefault("_aborted", asyncio.Event())
        event: asyncio.Event = self.__dict__["_aborted"]
        return event

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        try:
            script = self._scripts[int(request.request_id)]
            if script and isinstance(script[0], list):
                script = script.pop(0)
            for step in script:
                await asyncio.sleep(0)
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await self.aborted.wait()
                    yield RequestOutput(request.request_id, [], finish_reason="abort")
                elif step.error == "the engine ended":
                    self.status = EngineStatus("restarting")
                    yield step
                else:
                    yield step
        finally:
            self.closed.append(request.request_id)


def output(*token_ids: int, **fields: Any) -> RequestOutput:
    return RequestOutput("0", list(token_ids), **fields)


def generation(
    engine: ScriptedEngine,
    tokenizer: Tokenizer,
    count: int = 1,
    *,
    stop: tuple[str, ...] = (),
    parser: AnswerParser | None = None,
    **sampling: Any,
) -> tuple[Generation, Metrics, Admission]:
    metrics, admission = Metrics("m"), Admission(8)
    runs = [
        SequenceRun(
            index,
            GenerateRequest(str(index), [5, 6], SamplingParams(max_tokens=99, **sampling)),
            OutputText(tokenizer.detokenizer(), stop, parser=parser),
            RequestTimeline(),
        )
        for index in range(count)
    ]
    return Generation(runs, cast(EngineClient, engine), metrics, admission.acquire(count)), metrics, admission


async def collect(generation: Generation) -> list[Delta]:
    return [delta async for delta in generation.deltas()]


def sample(metrics: Metrics, name: str, **labels: str) -> float:
    return metrics.registry.get_sample_value(name, {"model_name": "m", **labels}) or 0.0


async def test_several_tokens_in_one_output_stop_in_the_middle(byte_tokenizer: Tokenizer) -> None:
    ids = byte_tokenizer.encode("one two three four five")
    logprobs = [TokenLogprob(token_id, -1.0) for token_id in ids]
    engine = ScriptedEngine([output(*ids, logprobs=logprobs), None])
    work, metrics, admission = generation(engine, byte_tokenizer, stop=(" three",))
    (delta,) = await collect(work)
    assert delta.part.content == "one two"
    assert (delta.finish_reason, delta.stop_reason) == ("stop", " three")
    assert [entry.token_id for entry in delta.logprobs] == ids[:3]
    assert work.usage().completion_tokens == 3
    assert engine.closed == ["0"]
    assert admission.held == 0
    assert sample(metrics, "nf4_request_success_total", finished_reason="stop") == 1


async def test_text_that_is_held_back_keeps_its_logprobs(byte_tokenizer: Tokenizer) -> None:
    first, second = byte_tokenizer.encode(" of")[0], byte_tokenizer.encode(" cat")[0]
    script = [
        output(first, logprobs=[TokenLogprob(first, -0.5)]),
        output(second, logprobs=[TokenLogprob(second, -0.7)], finish_reason="length"),
    ]
    work, _, _ = generation(ScriptedEngine(script), byte_tokenizer, stop=(" office",))
    (delta,) = await collect(work)
    assert delta.part.content == " of cat"
    assert [entry.token_id for entry in delta.logprobs] == [first, second]
    assert delta.finish_reason == "length"


@pytest.mark.parametrize(
    ("last", "status", "code"),
    [
        (output(finish_reason="error", error="out of memory"), 500, "engine_error"),
        (output(finish_reason="abort"), 503, "shutting_down"),
        (EngineUnavailableError("the engine is restarting"), 503, "engine_unavailable"),
    ],
)
async def test_engine_that_gives_up(
    byte_tokenizer: Tokenizer, last: RequestOutput | Exception, status: int, code: str
) -> None:
    engine = ScriptedEngine([output(50), last])
    work, metrics, admission = generation(engine, byte_tokenizer)
    with pytest.raises(ApiError) as raised:
        await collect(work)
    assert (raised.value.status, raised.value.code) == (status, code)
    assert admission.held == 0
    assert sample(metrics, "nf4_request_success_total", finished_reason="error") == 1


async def test_one_failing_choice_ends_all(byte_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([output(50), None], [output(50), output(finish_reason="error", error="x")], [None])
    work, metrics, admission = generation(engine, byte_tokenizer, 3)
    with pytest.raises(ApiError):
        await collect(work)
    assert sorted(engine.closed) == ["0", "1", "2"]
    assert admission.held == 0
    assert sample(metrics, "nf4_request_success_total", finished_reason="abort") == 2


@pytest.mark.parametrize("count", [1, 3])
async def test_reader_that_leaves_aborts_everything(byte_tokenizer: Tokenizer, count: int) -> None:
    engine = ScriptedEngine(*([output(50), None] for _ in range(count)))
    work, metrics, admission = generation(engine, byte_tokenizer, count)
    reader = asyncio.create_task(collect(work))
    for _ in range(20):
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert len(engine.closed) == count
    assert admission.held == 0
    assert sample(metrics, "nf4_request_success_total", finished_reason="abort") == count


async def test_choices_are_merged_in_order_of_arrival(byte_tokenizer: Tokenizer) -> None:
    cat = byte_tokenizer.encode(" cat")[0]
    slow = [output(cat) for _ in range(5)] + [output(cat, finish_reason="length")]
    fast = [output(cat, finish_reason="length")]
    work, _, _ = generation(ScriptedEngine(slow, fast), byte_tokenizer, 2)
    deltas = await collect(work)
    assert [delta.index for delta in deltas if delta.finish_reason] == [1, 0]
    assert "".join(delta.part.content for delta in deltas if delta.index == 0) == " cat" * 6
    assert work.usage().completion_tokens == 7
    assert work.usage().prompt_tokens == 4


async def test_the_engines_timings_become_histograms(byte_tokenizer: Tokenizer) -> None:
    timings = RequestTimings(0.1, 0.2, 0.3, 1e-5, 2e-5, 3e-5, 4e-5)
    work, metrics, _ = generation(ScriptedEngine([output(50, finish_reason="length", timings=timings)]), byte_tokenizer)
    await collect(work)
    for name, value in (("queue", 0.1), ("prefill", 0.2), ("decode", 0.3)):
        assert sample(metrics, f"nf4_request_{name}_time_seconds_sum") == value
    assert sample(metrics, "nf4_request_dequant_seconds_sum", phase="prefill") == 1e-5
    assert sample(metrics, "nf4_request_linear_seconds_sum", phase="decode") == 4e-5
    assert sample(metrics, "nf4_request_dequant_seconds_bucket", phase="prefill", le="1e-05") == 1


def ended() -> RequestOutput:
    return output(finish_reason="error", error="the engine ended")


async def test_request_that_had_not_begun_is_asked_again(byte_tokenizer: Tokenizer) -> None:
    (cat,) = byte_tokenizer.encode(" cat")
    engine = ScriptedEngine([[ended()], [output(cat, finish_reason="length")]])  # type: ignore[list-item]
    work, _, admission = generation(engine, byte_tokenizer)
    assert [delta.part.content for delta in await collect(work)] == [" cat"]
    assert engine.waited == 1
    assert admission.held == 0


@pytest.mark.parametrize("scripts", [[[ended()], [ended()]], [[output(50), ended()], [output(50)]]])
async def test_but_once_only_and_not_when_it_had_begun(byte_tokenizer: Tokenizer, scripts: Any) -> None:
    engine = ScriptedEngine([list(script) for script in scripts])  # type: ignore[list-item]
    work, _, _ = generation(engine, byte_tokenizer)
    with pytest.raises(ApiError) as raised:
        await collect(work)
    assert raised.value.code == "engine_error"


async def test_time_limit(byte_tokenizer: Tokenizer) -> None:
    engine = ScriptedEngine([output(50), None])
    work, _, admission = generation(engine, byte_tokenizer)
    work._timeout_s = 0.05
    with pytest.raises(ApiError) as raised:
        await collect(work)
    assert (raised.value.status, raised.value.code) == (504, "timeout")
    assert admission.held == 0


def test_a_refused_request_is_told_how_fast_others_end_since_the_server_had_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0] * 10**9)
    admission = Admission(2)

    def retry_after() -> str:
        with pytest.raises(ApiError) as refused:
            admission.acquire(1)
        return refused.value.headers["Retry-After"]

    tickets = [admission.acquire(1), admission.acquire(1)]
    for now[0] in (5, 10, 15):
        tickets.pop(0).release()
        tickets.append(admission.acquire(1))
    assert retry_after() == "4"  # 10 s since the first of three ends
    for ticket in tickets:
        ticket.release()
    now[0] = 600
    tickets = [admission.acquire(1), admission.acquire(1)]
    assert retry_after() == "1"


def test_prompts_under_way_are_bounded_by_their_tokens() -> None:
    admission = Admission(10, token_limit=100)
    first, second = admission.acquire(1), admission.acquire(1)
    first.hold_tokens(70)
    with pytest.raises(ApiError) as refused:
        second.hold_tokens(31)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    second.release()
    first.release()
    assert (admission.held, admission.held_tokens) == (0, 0)
    # One that is longer than the limit goes alone.
    admission.acquire(1).hold_tokens(500)


async def test_tokens_of_thoughts_are_those_up_to_their_end_mark(byte_tokenizer: Tokenizer) -> None:
    steps = [
        byte_tokenizer.encode(text) for text in ("<th", "ink>", "So ", "it ", "is</", "think>", "\n", "Paris", ".")
    ]
    engine = ScriptedEngine([*(output(*ids) for ids in steps[:-1]), output(*steps[-1], finish_reason="stop")])
    parser = AnswerParser(ReasoningSplitter(MARKS[0], opened=False))
    turn = Turn(generation(engine, byte_tokenizer, parser=parser)[0])
    parts = [delta.part async for delta in turn.deltas()]
    assert ("".join(part.reasoning for part in parts), "".join(part.content for part in parts)) == (
        "So it is",
        "Paris.",
    )
    assert turn.usage().completion_tokens_details == CompletionTokensDetails(sum(map(len, steps[:6])))
