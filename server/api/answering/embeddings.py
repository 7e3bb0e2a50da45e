"""Embeddings of many inputs by the engine: the final hidden states of their last tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from server.api.answering.limits import resolve_max_tokens
from server.api.answering.sequence_run import SequenceRun, too_late
from server.api.answering.service import Backend, Service
from server.api.http.admission import Ticket
from server.api.http.deadline import allowed_seconds
from server.api.http.streaming import closing
from server.logs import request_id
from server.observability.timeline import RequestTimeline
from server.text.output import OutputText
from server.types import GenerateRequest, SamplingParams


async def embed(
    service: Service,
    backend: Backend,
    ticket: Ticket,
    inputs: Sequence[list[int]],
    *,
    together: int,
    model: str,
    answer_id: str,
    arrival: float,
) -> list[bytes]:
    """Each input's hidden state, float32 little-endian, in their order. Raises ApiError.

    together: how many inputs the ticket has room for, and so are in the engine at a time. arrival: when the request came,
    in seconds of time.monotonic().
    """
    adapter = service.adapter(model)
    timeout_s = allowed_seconds(service.config.http.request_timeout_s)
    sampling = SamplingParams(max_tokens=1, embed=True)
    runs = []
    for index, ids in enumerate(inputs):
        # Room for one token more is asked for, as the engine takes no prompt that nothing can follow.
        resolve_max_tokens(backend, len(ids), 1, None, "input")
        request = GenerateRequest(f"{answer_id}-{index}", ids, sampling, adapter, request_id.get())
        text = OutputText(backend.tokenizer.detokenizer(), ())
        runs.append(SequenceRun(index, request, text, RequestTimeline(arrival=arrival)))
    ticket.hold_tokens(sum(map(len, inputs)))
    places = asyncio.Semaphore(together)

    async def one(run: SequenceRun) -> bytes:
        async with places, closing(run.deltas(backend.engine, service.metrics)) as deltas:
            async for _ in deltas:
                pass
        assert run.embedding is not None
        return run.embedding

    tasks = [asyncio.ensure_future(one(run)) for run in runs]
    left = None if timeout_s is None else max(0.0, arrival + timeout_s - time.monotonic())
    try:
        async with asyncio.timeout(left):
            return await asyncio.gather(*tasks)
    except TimeoutError as e:
        raise too_late() from e
    finally:
        # Closing a sequence that still runs aborts it in the engine.
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
