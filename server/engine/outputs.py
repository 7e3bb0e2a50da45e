"""Outputs for each request: the tokens of a step with their log-probabilities, an error, and times."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from nf4_kernels.timing import KernelTimes
from server.engine.clock import RequestClock, StepClock
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.sequence import Sequence
from server.engine.scheduling.step import Chunk, Step
from server.types import RequestOutput, TokenLogprob


class OutputBuilder:
    """Makes RequestOutputs, and keeps the clocks from which their timings are read.

    A request is known from open() until close() or its last output.
    """

    def __init__(self, kernel_times: Callable[[], KernelTimes]) -> None:
        """kernel_times: the kernels' own clocks, in seconds since the process began."""
        self.step_clock = StepClock(kernel_times)
        self._clocks: dict[str, RequestClock] = {}

    def open(self, request_id: str) -> None:
        """Note that a request has arrived."""
        self._clocks[request_id] = RequestClock(time.perf_counter())

    def close(self, request_id: str) -> None:
        """Note that a request has ended without a last output; an unknown id is ignored."""
        self._clocks.pop(request_id, None)

    def schedule(self, sequences: list[Sequence]) -> None:
        """Note that these are part of the step that has just started."""
        for sequence in sequences:
            self._clocks[sequence.request_id].schedule(self.step_clock.started)

    def tell(self, step: Step, results: list[Sampled], failures: dict[str, str]) -> list[RequestOutput]:
        """Give the outputs of the step that has just stopped; its kernel times are divided among them.

        results: one for each chunk that samples. failures: the reasons of requests that failed, by request id.
        """
        dequant, linear = self.step_clock.shares(step.num_tokens or 1)
        outputs = list[RequestOutput]()
        following = iter(results)
        clocks, now = self._clocks, self.step_clock.stopped
        # With a thousand sequences, a call for each of them takes a tenth of a millisecond: most need one here.
        for chunk in step.chunks:
            sequence, length = chunk.sequence, chunk.length
            request_id = sequence.request_id
            clock = clocks[request_id]
            drafts = chunk.draft_tokens
            if chunk.start >= sequence.num_prompt and length == 1 + len(drafts):
                clock.dequant_decode += dequant * length
                clock.linear_decode += linear * length
            else:
                clock.dequant_prefill += dequant * length
                clock.linear_prefill += linear * length
            if not chunk.samples:
                continue
            result = next(following)
            if failures and request_id in failures:
                continue
            if drafts:
                outputs.append(self._tokens(chunk, result))
                continue
            is_plain = result.logprob is None and result.embedding is None and sequence.finish_reason is None
            if is_plain and clock.first_token is not None:
                timings, cached = clock.token(now), sequence.num_cached
                outputs.append(RequestOutput(request_id, [result.token], None, None, None, cached, None, None, timings))
            else:
                outputs.append(self.token(sequence, result))
        return [*(self.error(request_id, reason) for request_id, reason in failures.items()), *outputs]

    def error(self, request_id: str, reason: str) -> RequestOutput:
        """The last output of a request that failed."""
        self.close(request_id)
        return RequestOutput(request_id, [], finish_reason="error", error=reason)

    def token(self, sequence: Sequence, result: Sampled) -> RequestOutput:
        """A request's next token, or the embedding of one that asked for it."""
        request_id, finish_reason, logprob = sequence.request_id, sequence.finish_reason, result.logprob
        timings = self._clocks[request_id].token(self.step_clock.stopped)
        if finish_reason is not None:
            del self._clocks[request_id]
        return RequestOutput(
            request_id,
            [result.token] if result.embedding is None else [],
            finish_reason,
            sequence.stop_token_id,
            None,
            sequence.num_cached,
            None if logprob is None else [logprob],
            None if sequence.sampling.prompt_logprobs is None else _prompt_logprobs(sequence),
            timings,
            result.embedding,
        )

    def _tokens(self, chunk: Chunk, result: Sampled) -> RequestOutput:
        """token() of a chunk with draft tokens, as many as the sequence has got."""
        clock, added = self._clocks[chunk.sequence.request_id], chunk.num_added
        clock.draft_tokens += len(chunk.draft_tokens)
        clock.accepted_tokens += added - 1
        results = [*result.accepted, result][:added]
        return msgspec.structs.replace(
            self.token(chunk.sequence, results[-1]),
            new_token_ids=[own.token for own in results],
            logprobs=[own.logprob for own in results if own.logprob is not None] or None,
        )


def _prompt_logprobs(sequence: Sequence) -> list[TokenLogprob] | None:
    """The log-probabilities of a prompt that was scored; they go out once, with the first token."""
    if sequence.num_generated != 1:
        return None
    return [sequence.prompt_scores[position] for position in range(1, sequence.num_prompt)]
