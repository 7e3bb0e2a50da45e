"""Messages and values that cross room or process borders: plain msgspec structs, no torch, no FastAPI."""

from __future__ import annotations

from typing import Literal

import msgspec

LITERAL_CHARACTERS = "literal_characters"
"""A grammar's key, which llguidance leaves alone: what its literals have besides printable ASCII."""
UNFOLLOWABLE = "the answer's grammar cannot be followed any further"

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """Sampling options of one request. Field meanings are OpenAI's where OpenAI has the field.

    temperature 0 is greedy. top_k 0, top_p 1.0 and min_p 0.0 switch that filter off. Penalties follow OpenAI
    (presence, frequency: over generated tokens) and CTRL/transformers (repetition: over prompt and generated tokens).
    max_tokens is resolved by the API before sending: always >= 1 and prompt + max_tokens <= max_model_len.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    """Number of most likely alternatives to return per token (0 to 20); None returns no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, from the second on; a prompt that is scored is not looked up in the cache."""
    embed: bool = False
    """The final hidden state of the prompt's last token is wanted, and no token; max_tokens is 1."""
    speculation: bool = True
    """Whether steps may have draft tokens, where the engine has speculation; the answer is the same."""
    grammar: str | None = None
    """A grammar that the text has to match, in llguidance's JSON form, which may have LITERAL_CHARACTERS."""


class ImageInput(msgspec.Struct, frozen=True, gc=False):
    """An image of a prompt, as its model's image processor has prepared it."""

    key: bytes
    """Names the image's bytes and how they were prepared: equal keys, equal features."""
    start: int
    """Place of its first placeholder in the prompt."""
    end: int
    """Place behind its last placeholder; between them may be other tokens, such as those that end a row of patches."""
    file: str
    """A safetensors file of what the model's image tower takes: pixel_values, and image_sizes or image_grid_thw."""


class GenerateRequest(msgspec.Struct, tag="generate", frozen=True):
    """API to engine: generate from prompt_token_ids (never empty, ids already checked against the vocabulary)."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    adapter: str | None = None
    http_request_id: str = ""
    """Id of the HTTP request that asked for it, for the engine's log."""
    images: list[ImageInput] = []
    client: int = 0
    """The API process that it is of; 0 is the one that supervises the engine."""


class AbortRequest(msgspec.Struct, tag="abort", frozen=True):
    """API to engine: forget these requests and free their blocks. Unknown ids are ignored; no output follows."""

    request_ids: list[str]


class RemoveClient(msgspec.Struct, tag="remove_client", frozen=True):
    """API to engine: this API process has ended; its requests are forgotten."""

    client: int


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """API to engine: load the LoRA adapter in a folder under a name, replacing one of that name.

    AdapterResult tells how it went. Requests that run with a replaced adapter end with it.
    """

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """API to engine: forget an adapter, for requests that come after this one."""

    name: str


class Shutdown(msgspec.Struct, tag="shutdown", frozen=True):
    """API to engine: leave the loop and exit 0."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural-log probabilities of one generated token, after penalties and bias, before temperature and filters."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []
    """(token id, logprob) of the most likely tokens, most likely first."""
    rank: int | None = None
    """The token's place among all by probability, from 1 on; known of prompt tokens only."""


class RequestTimings(msgspec.Struct, frozen=True, gc=False):
    """Times of one request, in seconds. Totals so far, sent with every output:
    a request that the API ends has them too.

    dequant and linear are this request's share (by tokens in each step) of the time the steps it took part in spent in
    NF4 dequantization and in NF4 linear layers as a whole.
    """

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    dequant_prefill: float = 0.0
    dequant_decode: float = 0.0
    linear_prefill: float = 0.0
    linear_decode: float = 0.0
    draft_tokens: int = 0
    """Draft tokens that were verified (speculation); not a time."""
    accepted_tokens: int = 0
    """Draft tokens that were accepted; not a time."""


class RequestOutput(msgspec.Struct, frozen=True, gc=False):
    """Output of a step, or of several, for one request. The last output of a request has finish_reason set.

    An end-of-sequence or stop token that ended the request is included in new_token_ids.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The EOS or stop token that ended the request, when finish_reason is "stop"."""
    error: str | None = None
    """A one-line reason, when finish_reason is "error"; begins with UNFOLLOWABLE if that is the request's own."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was found in the prefix cache."""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Log-probabilities of the prompt's tokens from the second on, with the first output of a request that wants them."""
    timings: RequestTimings | None = None
    embedding: bytes | None = None
    """Hidden state of a request with embed: float32 little-endian [hidden size]. Its output has no tokens."""

    def followed_by(self, later: RequestOutput) -> RequestOutput:
        """Both as one output; later is the next one of the same request."""
        scored = [output.logprobs for output in (self, later) if output.logprobs is not None]
        return RequestOutput(
            self.request_id,
            self.new_token_ids + later.new_token_ids,
            later.finish_reason,
            later.stop_token_id,
            later.error,
            later.num_cached_tokens,
            [entry for logprobs in scored for entry in logprobs] if scored else None,
            self.prompt_logprobs if later.prompt_logprobs is None else later.prompt_logprobs,
            later.timings,
            later.embedding,
        )


class EngineStats(msgspec.Struct, frozen=True):
    """The engine's state after a step; counters count since the engine started."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    preemptions: int = 0
    failed_steps: dict[str, int] = {}
    step_seconds: float = 0.0
    step_tokens: int = 0
    step_prefill_tokens: int = 0
    step_batch: int = 0
    dequant_seconds_total: float = 0.0
    kernel_seconds: dict[str, float] = {}
    """Seconds of NF4 work by what did it: linear layers by their kernel, and dequantization."""
    linear_seconds_total: float = 0.0
    prefix_cache_queries: int = 0
    """Tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    state_slots: int = 0
    """Sequences whose states there is memory for; 0: the model's layers have none."""
    state_snapshot_slots: int = 0
    """Snapshots of states that there is memory for."""
    state_snapshots: int = 0
    """Snapshots that can be found on the device."""
    state_snapshots_on_host: int = 0
    """Those in host memory."""
    state_snapshot_hits: int = 0
    """Sequences that began with a snapshot."""
    state_snapshot_host_hits: int = 0
    """Those of them whose snapshot only the host had."""
    drafts: int = 0
    """Times that a sequence had draft tokens in a step (speculation)."""
    draft_tokens: int = 0
    accepted_by_place: list[int] = []
    """Those that were accepted, by their place among a sequence's draft tokens of a step; empty without speculation."""
    images_computed: int = 0
    image_feature_hits: int = 0
    """Times that a step needed an image's features and found them kept."""
    image_tower_seconds: float = 0.0
    """Seconds of the tower's work; on CUDA by the device's clock."""
    graph_replays: int = 0
    device_memory_used: int = 0
    """Bytes: on CUDA of the whole device, on CPU resident in the engine process; as of a moment ago."""
    device_memory_total: int = 0
    other_device_memory: list[tuple[int, int]] = []
    """(used, total) of the other ranks' devices, from rank 1 on."""
    nf4_weight_bytes: int = 0
    """Codes and scales of all NF4 layers: what a step reads at least."""
    lora_slots: int = 0
    running_adapters: list[str] = []
    """Names of the LoRA adapters of running requests, in alphabetical order; no more than there is room for."""
    waiting_adapters: list[str] = []
    """Names of the LoRA adapters of waiting requests, in alphabetical order."""


class StepOutputs(msgspec.Struct, tag="step", frozen=True):
    """Engine to API: everything one step produced, or two that ended one behind the other."""

    outputs: list[RequestOutput]
    stats: EngineStats
    before: EngineStats | None = None
    """The state after the first step, where two ended in one call of the engine."""


class ClientOutputs(msgspec.Struct, frozen=True):
    """Engine to another API process than the one that supervises it: what one step produced for its requests."""

    outputs: list[RequestOutput]


class LoadProgress(msgspec.Struct, tag="progress", frozen=True):
    """Engine to API while starting: what it is doing, and how far it is (0 to 1)."""

    stage: str
    fraction: float


class EngineReady(msgspec.Struct, tag="ready", frozen=True):
    """Engine to API once, when requests are accepted."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    device: str
    dtype: str
    kernels: str
    """NF4 kernels that run, in words (for logs and /health)."""
    tensor_parallel_size: int = 1
    """Processes, each with a device, that compute the model together."""
    expanded_weight_bytes: int = 0
    """16-bit copies of NF4 weights (engine.expanded_weights)."""
    adapters: list[str] = []
    images: bool = False
    """Whether the model's image tower is loaded, so that prompts may have images."""


class AdapterResult(msgspec.Struct, tag="adapter", frozen=True):
    """Engine to API: what came of a LoadAdapter; error is one line, or None."""

    name: str
    error: str | None = None


class EngineFailed(msgspec.Struct, tag="failed", frozen=True):
    """Engine to API: the engine is about to exit; fatal means that starting it again cannot help (bad checkpoint)."""

    message: str
    fatal: bool = False


ToEngine = GenerateRequest | AbortRequest | RemoveClient | LoadAdapter | UnloadAdapter | Shutdown
FromEngine = StepOutputs | LoadProgress | EngineReady | AdapterResult | EngineFailed
