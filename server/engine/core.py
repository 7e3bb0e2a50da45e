"""The engine without its process: it takes requests and gives the outputs of one step at a time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from server.config import EngineConfig
from server.engine.accounting import Accounting, Settled
from server.engine.execution import Executor
from server.engine.grammar import Grammars
from server.engine.outputs import OutputBuilder
from server.engine.requests import check_request
from server.engine.runtime.graphs.launched_step import LaunchedStep
from server.engine.runtime.limits import token_budget
from server.engine.runtime.runner import ModelRunner
from server.engine.runtime.sampling.sampler import Sampled
from server.engine.scheduling.blocks import BlockManager
from server.engine.scheduling.pace import PrefillPace
from server.engine.scheduling.prompt_images import PromptImages
from server.engine.scheduling.scheduler import Scheduler
from server.engine.scheduling.sequence import LoadedAdapter, Phase, Sequence
from server.engine.scheduling.snapshots import Snapshots
from server.engine.scheduling.step import Step
from server.engine.speculation.drafts import DraftSpeculator
from server.engine.speculation.speculator import Speculator
from server.types import (
    AdapterResult,
    EngineStats,
    GenerateRequest,
    RequestOutput,
    StepOutputs,
)

logger = logging.getLogger(__name__)


class Engine:
    """Scheduler and model runner together. Single-threaded: call step() while has_work."""

    def __init__(
        self,
        runner: ModelRunner,
        config: EngineConfig,
        grammars: Grammars | None = None,
        other_memory: Callable[[], list[tuple[int, int]]] | None = None,
    ) -> None:
        """other_memory: (bytes used, bytes) of the devices of the other ranks, where there are any."""
        self._runner = runner
        self._executor = Executor(runner)
        self._other_memory = other_memory
        self._grammars = grammars
        limits = runner.limits
        self._blocks = BlockManager(limits.num_blocks, config.block_size)
        bound = config.max_prefill_ms
        self._pace = None if bound is None else PrefillPace(bound / 1000)
        self._snapshots = _snapshots_of(runner, config)
        self._scheduler = Scheduler(
            self._blocks,
            limits.max_num_seqs,
            token_budget(config, runner.device),
            limits.max_model_len,
            config.enable_prefix_caching and (runner.states is None or self._snapshots is not None),
            self._pace,
            self._snapshots,
            () if runner.states is None else runner.states.backups,
        )
        self._eos = frozenset(limits.eos_token_ids)
        self._outputs = OutputBuilder(self._runner.kernel_times)
        self._step_clock = self._outputs.step_clock
        self._rejected: list[RequestOutput] = []
        self._pending: LaunchedStep | None = None
        # A step that has been scheduled and waits until the outputs of the one before have gone.
        self._deferred: Step | None = None
        self._random = random.SystemRandom()
        self._speculator = self._make_speculator(config)
        self._accounting = Accounting(self._scheduler, self._outputs, self._pace)

    def _make_speculator(self, config: EngineConfig) -> Speculator | None:
        costs, longest, draft_model = (
            self._runner.step_costs,
            self._runner.limits.max_model_len,
            self._runner.draft_model,
        )
        if config.speculation == "off" or costs is None:
            return None
        if config.speculation == "lookup":
            return Speculator(costs, longest)
        assert draft_model is not None
        budget = token_budget(config, self._runner.device)
        pace = self._pace
        most = (lambda: budget) if pace is None else (lambda: min(budget, pace.tokens))
        return DraftSpeculator(costs, longest, draft_model, self._blocks, most)

    @property
    def has_work(self) -> bool:
        """Whether step() has something to do."""
        return self._scheduler.has_work or self._pending is not None or bool(self._rejected)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request; one that cannot run gets its error as the output of the next step."""
        try:
            check_request(request, self._runner.limits.vocab_size)
            own = request.sampling.seed
            seed = self._random.getrandbits(63) if own is None else own
            sequence = Sequence(request, seed, self._eos, self._adapter(request), self._images(request))
            if request.sampling.grammar is not None:
                if self._grammars is None:
                    raise ValueError("this engine was made without grammars")
                sequence.bind(self._grammars.start(request.sampling.grammar))
            self._scheduler.add(sequence)
        except ValueError as e:
            self._rejected.append(RequestOutput(request.request_id, [], finish_reason="error", error=str(e)))
            return
        self._outputs.open(request.request_id)

    def _adapter(self, request: GenerateRequest) -> LoadedAdapter | None:
        if request.adapter is None:
            return None
        if self._runner.adapters is None:
            raise ValueError("this engine was started without adapters")
        return self._runner.adapters.get(request.adapter)

    def _images(self, request: GenerateRequest) -> PromptImages | None:
        if not request.images:
            return None
        if self._runner.tower is None:
            raise ValueError("the model's image tower is not loaded")
        return self._runner.tower.layout(request.prompt_token_ids, request.images)

    def settle_adapters(self) -> list[AdapterResult]:
        """Load adapters whose folders have been read; call between steps."""
        adapters = self._runner.adapters
        if adapters is None or adapters.num_reading == 0:
            return []
        return adapters.settle(self._scheduler.adapters_in_use)

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests and free their blocks now; no output follows. Unknown ids are ignored."""
        for request_id in request_ids:
            self._scheduler.finish(request_id, "abort")
            self._outputs.close(request_id)
        if self._deferred is not None:
            self._deferred.leave_out_ended()
            if not self._deferred.size:
                self._deferred = None

    def step(self) -> StepOutputs:
        """Read the step that was launched before, if there is one, and launch or run the next one.

        A step with prompts is run by the next call, where one has been read: its tokens need not wait for the prompts.
        A sequence whose computation fails ends with finish_reason "error"; the others go on.
        """
        outputs, self._rejected = self._rejected, []
        begun = time.perf_counter()
        # What was launched gives its pinned memory back when this returns, not while the device waits.
        previous, self._pending = self._pending, None
        # Async scheduling: where the runner can, this step is launched before the last one's tokens are read.
        unread, settled = previous, None
        if unread is not None and unread.step.drafts:
            # What is next depends on which were accepted. The requests are told while the device goes on.
            settled, unread = self._read(unread), None
        step = self._next_step()
        if previous is None:
            self._step_clock.start()
        if (read := self._propose(step, unread)) is not None:
            settled, unread = read, None
        launched = self._runner.execute_async(step, unread) if step.size else None
        if unread is not None:
            settled = self._read(unread)
        if settled is not None:
            outputs += self._accounting.tell(settled)
        # Sampling under grammars had to wait for the tokens of the last step.
        if launched is not None and not launched.complete():
            launched = None
        ran = None if previous is None else previous.step
        before: EngineStats | None = None
        if launched is None:
            step.leave_out_ended()
            if ran is not None and not step.is_decode:
                # Tokens that have been read are told before a prompt's step, which may take much longer than theirs.
                self._deferred = step
                return StepOutputs(outputs, self.stats(ran))
        self._outputs.schedule([sequence for sequence in step.admitted if sequence.phase is Phase.RUNNING])
        if launched is not None:
            step.ahead = unread is not None
            self._scheduler.advance(step)
            self._pending = launched
        elif step.size:
            before = None if ran is None else self.stats(ran)
            results, failures = self._executor.execute(step)
            self._scheduler.advance(step)
            outputs += self._accounting.tell(self._settle(step, results, failures))
            ran = step
        if self._speculator is not None:
            if ran is step and previous is None:
                self._speculator.note_time(step, time.perf_counter() - begun)
            self._speculator.catch_up(step)
        return StepOutputs(outputs, self.stats(ran), before)

    def _propose(self, step: Step, unread: LaunchedStep | None) -> Settled | None:
        """Give a step draft tokens if they are expected to pay; what unread came to, if it had to be read for that."""
        speculator, settled = self._speculator, None
        drafts = {} if speculator is None else speculator.plan(step)
        if speculator is None or not drafts:
            return None
        if unread is not None:
            # They follow from tokens that the host knows.
            settled = self._read(unread)
            step.leave_out_ended()
            drafts = speculator.plan(step)
        self._scheduler.schedule_drafts(step, drafts)
        speculator.propose(step)
        return settled

    def _read(self, launched: LaunchedStep) -> Settled:
        """Wait for a launched step, and give its sequences their tokens."""
        settled = self._settle(launched.step, launched.read(), {})
        if self._speculator is not None and (launched.step.ahead or launched.step.drafts):
            # What draft tokens delay, because they need the tokens of the step in front, is no cost of a step without them.
            self._speculator.note_time(launched.step, self._step_clock.seconds)
        self._step_clock.start()
        return settled

    def _settle(self, step: Step, results: list[Sampled], failures: dict[str, str]) -> Settled:
        settled = self._accounting.settle(step, results, failures)
        if self._speculator is not None:
            self._speculator.note_accepted(settled.step)
        return settled

    def _next_step(self) -> Step:
        """The step that waits for its turn, as far as its sequences still run, or the scheduler's."""
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            deferred.leave_out_ended()
        return deferred if deferred is not None and deferred.size else self._scheduler.schedule()

    def stats(self, step: Step | None = None) -> EngineStats:
        """The state now, and the figures of the step that has just run."""
        clock = self._step_clock
        adapters, speculator, tower = self._runner.adapters, self._speculator, self._runner.tower
        states, snapshots = self._runner.states, self._snapshots
        memory_used, memory_total = self._runner.memory.read()
        return EngineStats(
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            kv_blocks_used=self._blocks.num_used,
            kv_blocks_total=self._blocks.num_blocks,
            preemptions=self._scheduler.num_preemptions,
            failed_steps=dict(self._executor.failed_steps),
            step_seconds=clock.seconds if step else 0.0,
            step_tokens=step.num_tokens if step else 0,
            step_prefill_tokens=step.prefill_tokens if step else 0,
            step_batch=step.size if step else 0,
            dequant_seconds_total=clock.kernels.dequant,
            linear_seconds_total=clock.kernels.linear,
            kernel_seconds=clock.kernels.by_kernel,
            prefix_cache_queries=self._scheduler.prefix_cache.queries,
            prefix_cache_hits=self._scheduler.prefix_cache.hits,
            state_slots=0 if states is None else states.max_num_seqs,
            state_snapshot_slots=0 if states is None else len(states.snapshots),
            state_snapshots=0 if snapshots is None else len(snapshots.on_device),
            state_snapshots_on_host=0 if snapshots is None else len(snapshots.on_host),
            state_snapshot_hits=0 if snapshots is None else snapshots.hits,
            state_snapshot_host_hits=0 if snapshots is None else snapshots.host_hits,
            drafts=0 if speculator is None else speculator.drafts,
            draft_tokens=0 if speculator is None else speculator.draft_tokens,
            accepted_by_place=[] if speculator is None else list(speculator.accepted),
            images_computed=0 if tower is None else tower.runs,
            image_feature_hits=0 if tower is None else tower.hits,
            image_tower_seconds=0.0 if tower is None else tower.seconds,
            graph_replays=self._runner.graph_replays,
            device_memory_used=memory_used,
            device_memory_total=memory_total,
            other_device_memory=[] if self._other_memory is None else self._other_memory(),
            nf4_weight_bytes=self._runner.nf4_weight_bytes,
            lora_slots=0 if adapters is None else adapters.slots,
            running_adapters=[] if adapters is None else self._scheduler.adapter_names(Phase.RUNNING),
            waiting_adapters=[] if adapters is None else self._scheduler.adapter_names(Phase.WAITING),
        )


def _snapshots_of(runner: ModelRunner, config: EngineConfig) -> Snapshots | None:
    """The snapshots of states, if the model has states and the configuration has prefix caching."""
    states, size = runner.states, config.block_size
    if states is None or not (states.snapshots or states.host_snapshots) or not config.enable_prefix_caching:
        return None
    distance = -(-config.state_snapshot_tokens // size) * size
    return Snapshots(states.snapshots, distance, size, states.host_snapshots)
