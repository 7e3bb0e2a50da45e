"""One HTTP request's sequences are sent to the engine, turned into text, merged, and aborted when the client goes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence

from server.api.answering.sequence_run import Delta, SequenceRun
from server.api.http.admission import Ticket
from server.api.http.streaming import closing
from server.api.openai.protocol import Usage
from server.engine.supervisor.base import EngineBase
from server.observability.metrics import Metrics

logger = logging.getLogger(__name__)


class Generation:
    """All sequences of one HTTP request."""

    def __init__(
        self,
        runs: Sequence[SequenceRun],
        engine: EngineBase,
        metrics: Metrics,
        ticket: Ticket,
        timeout_s: float | None = None,
    ) -> None:
        self.runs = runs
        self._timeout_s = timeout_s
        self._ending: asyncio.Task[None] | None = None
        self._engine = engine
        self._metrics = metrics
        self._ticket = ticket

    def usage(self) -> Usage:
        """Tokens so far; a prompt that several sequences share counts once."""
        prompts = {id(run.request.prompt_token_ids): run for run in self.runs}.values()
        return Usage.of(
            sum(len(run.request.prompt_token_ids) for run in prompts),
            sum(run.completion_tokens for run in self.runs),
            sum(run.timeline.cached_tokens for run in prompts),
        )

    async def deltas(self) -> AsyncIterator[Delta]:
        """Deltas of all sequences, each when it has been generated. Closing aborts what still runs. Raises ApiError."""
        timer = None
        if self._timeout_s is not None:
            timer = asyncio.get_running_loop().call_later(self._timeout_s, self._time_out)
        try:
            single = len(self.runs) == 1
            stream = self.runs[0].deltas(self._engine, self._metrics) if single else self._merged()
            async with closing(stream) as deltas:
                async for delta in deltas:
                    yield delta
        finally:
            if timer is not None:
                timer.cancel()
            self.close()
            self._account()
            self._log()

    def _account(self) -> None:
        lengths: dict[int, list[int]] = {}
        for run in self.runs:
            lengths.setdefault(id(run.request.prompt_token_ids), []).append(run.timeline.generation_tokens)
        for answers in lengths.values():
            self._metrics.prompt_finished(len(answers), max(answers))

    def _time_out(self) -> None:
        for run in self.runs:
            run.expire()
        self._ending = asyncio.ensure_future(self._engine.abort([run.request.request_id for run in self.runs]))

    def close(self) -> None:
        """Give up the request's place among the others; a generation that was never read needs this, too."""
        self._ticket.release()

    async def _merged(self) -> AsyncIterator[Delta]:
        ready: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

        async def pump(run: SequenceRun) -> None:
            try:
                async with closing(run.deltas(self._engine, self._metrics)) as deltas:
                    async for delta in deltas:
                        ready.put_nowait(delta)
                ready.put_nowait(None)
            except Exception as e:
                ready.put_nowait(e)

        tasks = [asyncio.create_task(pump(run)) for run in self.runs]
        try:
            running = len(tasks)
            while running:
                item = await ready.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*tasks, return_exceptions=True)

    def _log(self) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        for run in self.runs:
            timeline = run.timeline
            first = timeline.time_to_first_token
            rate = timeline.tokens_per_second
            logger.info(
                "%s %s: prompt %d, generated %d tokens, first after %s, %s, %.0f ms in all",
                run.request.request_id,
                timeline.finish_reason,
                timeline.prompt_tokens,
                run.completion_tokens,
                "-" if first is None else f"{1000 * first:.0f} ms",
                "-" if rate is None else f"{rate:.1f} tokens/s",
                1000 * (timeline.total or 0.0),
            )
