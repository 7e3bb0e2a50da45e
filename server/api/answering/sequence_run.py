"""One sequence, from the engine's outputs to what it adds to an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from server.api.http.errors import SERVER_ERROR, ApiError, bad_request, engine_failed, unavailable
from server.api.http.streaming import closing
from server.engine.supervisor.base import EngineBase, EngineUnavailableError
from server.observability.metrics import Metrics
from server.observability.timeline import RequestTimeline, timelines
from server.text.answer import Part
from server.text.output import OutputText
from server.types import UNFOLLOWABLE, GenerateRequest, RequestOutput, TokenLogprob

logger = logging.getLogger(__name__)

Ending = Literal["stop", "length"]


@dataclass(slots=True)
class Delta:
    """Additions of one step to one sequence. finish_reason is set on the sequence's last delta."""

    index: int
    part: Part
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: Ending | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the sequence, unless that was the model's end-of-sequence token."""


class SequenceRun:
    """One sequence, from the engine's outputs to deltas of text."""

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        text: OutputText,
        timeline: RequestTimeline,
        *,
        include_stop: bool = False,
        grammar_param: str | None = None,
    ) -> None:
        """grammar_param: name of the option that bounds the text, in errors."""
        self.index = index
        self.request = request
        self.timeline = timeline
        self.text = text
        self._include_stop = include_stop
        self._grammar_param = grammar_param
        self._custom_stops = frozenset(request.sampling.stop_token_ids)
        self._logprobs: list[TokenLogprob] = []
        self.completion_tokens = 0
        self.reasoning_tokens = 0
        self._counted = 0
        self.embedding: bytes | None = None
        """The prompt's hidden state, where the request is for that: float32 little-endian."""
        self._expired = asyncio.Event()
        self._ended = False
        self.prompt_logprobs: list[TokenLogprob] = []
        """Log-probabilities of the prompt's tokens from the second on, if asked for; set before the first delta."""
        timeline.prompt_tokens = len(request.prompt_token_ids)
        timeline.max_tokens = request.sampling.max_tokens
        timeline.adapter = request.adapter
        together = timelines.get()
        if together is not None:
            together.append(timeline)

    async def deltas(self, engine: EngineBase, metrics: Metrics) -> AsyncIterator[Delta]:
        """Deltas until the sequence ends. Closing it early aborts the engine's request.

        Raises ApiError when the engine cannot finish it.
        """
        timeline = self.timeline
        timeline.finish_reason = "abort"
        try:
            async with closing(self._outputs(engine)) as outputs:
                async for output in outputs:
                    metrics.tokens_received(timeline, output)
                    delta = self._advance(output)
                    if delta is None:
                        continue
                    yield delta
                    if delta.finish_reason is not None or self._ended:
                        return
        except EngineUnavailableError as e:
            timeline.finish_reason = "error"
            raise unavailable(f"The model cannot generate now: {e}.", "engine_unavailable") from e
        except ApiError:
            timeline.finish_reason = "error"
            raise
        finally:
            metrics.sequence_finished(timeline)

    async def _outputs(self, engine: EngineBase) -> AsyncIterator[RequestOutput]:
        """The engine's outputs; a request that had no output when the engine died is sent once more to the next one.

        Only once: it may be the one that kills the engine.
        """
        begun = False
        async with closing(engine.generate(self.request)) as outputs:
            async for output in outputs:
                lost = output.finish_reason == "error" and engine.status.state == "restarting"
                if lost and not begun:
                    break
                begun = True
                yield output
            else:
                return
        logger.info("%s: the engine ended before it began; waiting for it", self.request.request_id)
        if not await self._wait_ready(engine):
            raise too_late()
        async with closing(engine.generate(self.request)) as outputs:
            async for output in outputs:
                yield output

    async def _wait_ready(self, engine: EngineBase) -> bool:
        """Whether the engine was ready before this request's time was over. Raises EngineUnavailableError."""
        ready = asyncio.create_task(engine.wait_ready())
        expired = asyncio.create_task(self._expired.wait())
        try:
            await asyncio.wait({ready, expired}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
            return not expired.done()
        finally:
            ready.cancel()
            expired.cancel()

    def end(self) -> None:
        """End the sequence as if the model had; the engine's request is aborted when the next delta is asked for."""
        self._ended = True
        self.timeline.finish_reason = "stop"

    def expire(self) -> None:
        """Note that the request's time is over; the caller aborts the engine's request."""
        self._expired.set()

    def _advance(self, output: RequestOutput) -> Delta | None:
        """The delta of one output; None when there is nothing to say yet."""
        if output.finish_reason == "error" and (output.error or "").startswith(UNFOLLOWABLE):
            reason = f"The engine could not finish this request (its '{self._grammar_param}'): {output.error}."
            raise bad_request(reason, self._grammar_param, "invalid_grammar")
        if output.finish_reason == "error":
            raise engine_failed(f"The engine could not finish this request: {output.error or 'no reason given'}.")
        if output.finish_reason == "abort" and self._expired.is_set():
            raise too_late()
        if output.finish_reason == "abort":
            raise unavailable("The request was given up because the server is shutting down.", "shutting_down")
        token_ids: Sequence[int] = output.new_token_ids
        hidden = (
            output.stop_token_id is not None and not self._include_stop and token_ids[-1:] == [output.stop_token_id]
        )
        self.embedding = output.embedding
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        before, thought = self.text.consumed, self.text.parser.thinking
        part = self.text.push(token_ids[:-1] if hidden else token_ids)
        # Tokens of the same step after the one that completed a stop string do not count.
        taken = self.text.consumed - before + (1 if hidden and self.text.stop_string is None else 0)
        self.completion_tokens += taken
        self._count_reasoning(part, thought=thought)
        if output.finish_reason is not None or self.text.stop_string is not None:
            part.add(self.text.finish())
        finish_reason, stop_reason = self._ending(output)
        self._logprobs.extend((output.logprobs or [])[:taken])
        if not part and finish_reason is None and not self.text.parser.repeated:
            return None
        if finish_reason is not None:
            self.timeline.finish_reason = finish_reason
        logprobs, self._logprobs = self._logprobs, []
        return Delta(self.index, part, logprobs, finish_reason, stop_reason)

    def _count_reasoning(self, part: Part, *, thought: bool) -> None:
        """thought: whether the tokens before these ended in thoughts."""
        count = self.completion_tokens
        if thought or self.text.parser.thinking or part.reasoning:
            self.reasoning_tokens += count - self._counted
        elif not part:
            return  # what is held back may become the mark of thoughts
        self._counted = count

    def _ending(self, output: RequestOutput) -> tuple[Ending | None, str | int | None]:
        if self.text.stop_string is not None:
            return "stop", self.text.stop_string
        if output.finish_reason == "stop":
            custom = output.stop_token_id in self._custom_stops
            return "stop", output.stop_token_id if custom else None
        return ("length", None) if output.finish_reason == "length" else (None, None)


def too_late() -> ApiError:
    """504: the request's time is over."""
    return ApiError(504, "The request took longer than it was allowed to.", type=SERVER_ERROR, code="timeout")
