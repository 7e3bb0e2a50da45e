"""The generation options that chat and text completions share: which there are, their limits, what they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from server.api.http.errors import bad_request
from server.api.openai.structured import StructuredOptions
from server.types import SamplingParams

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 512
MAX_LOGIT_BIASES = 1024
MAX_TOKEN_COUNT = 2**31 - 1

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "allowed_token_ids": (),
    "bad_words": (),
    "truncate_prompt_tokens": (),
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "guided_whitespace_pattern": (),
    "logits_processors": (),
    "typical_p": (1,),
    "typical": (1,),
    "top_a": (0,),
    "mirostat": (0, False),
    "mirostat_mode": (0,),
    "tfs_z": (1,),
    "tfs": (1,),
    "dynatemp_range": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "top_n_sigma": (-1, 0),
    "nsigma": (-1, 0),
    "do_sample": (True,),
    "stop_regex": (),
    "custom_logit_processor": (),
    "thinking_token_budget": (),
    "reasoning_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "thinking_budget": (),
    "repetition_detection": (),
    "structural_tag": (),
    # llama.cpp's, SGLang's and LoRAX's ways to ask for an adapter.
    "lora": (),
    "lora_path": (),
    "adapter_id": (),
    "template": (),
    "kv_transfer_params": ({},),
    # llama.cpp's.
    "samplers": (),
    "min_keep": (0, 1),
    "n_probs": (0,),
    "post_sampling_probs": (False,),
    "n_indent": (0,),
    "t_max_predict_ms": (-1, 0),
    "response_fields": (),
    "reasoning_format": ("auto", "deepseek", "parsed"),
    "parse_tool_calls": (True,),
    "thinking_forced_open": (False,),
    # Those of text-generation-webui and TabbyAPI.
    "no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "penalty_alpha": (0,),
    "num_beams": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "guidance_scale": (1,),
    "cfg_scale": (1,),
    "negative_prompt": (),
    "smoothing_factor": (0,),
    "min_temp": (1,),
    "max_temp": (1,),
    "temperature_last": (False,),
    "sampler_priority": (),
    "banned_strings": (),
    "banned_tokens": (),
    "custom_token_bans": (),
    "ban_eos_token": (False,),
    "add_bos_token": (True,),
    "token_healing": (False,),
    # Mistral's, NVIDIA's, Alibaba's.
    "safe_prompt": (False,),
    "prompt_mode": (),
    "nvext": ({},),
    "enable_search": (False,),
    "session_params": ({},),
    # SGLang's router writes these into every request.
    "no_stop_trim": (False,),
    "separate_reasoning": (True,),
    "stream_reasoning": (True,),
    "return_hidden_states": (False,),
}
"""Options of OpenAI's and its peers' servers that are not offered, with the values that ask for nothing."""


def _checked_stop(value: Any) -> Any:
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list):
        for stop in value:
            if isinstance(stop, str) and not 0 < len(stop) <= MAX_STOP_CHARACTERS:
                raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters")
    return value


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS}
_STOP = WithJsonSchema(
    {"anyOf": [_STOP_STRING, {"type": "array", "maxItems": MAX_STOP_STRINGS, "items": _STOP_STRING}]}
)


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of requests that leave them out. The defaults here are the OpenAI API's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class StreamOptions(BaseModel):
    """Contents of a stream besides the text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationOptions(StructuredOptions):
    """Options common to /v1/chat/completions and /v1/completions.

    user, metadata, safety_identifier and the prompt_cache fields are hints (server.api.http.hints). Everything else here
    changes the answer.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_COUNT)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_TOKEN_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIASES)] | None
    ) = None
    stop: Annotated[list[str], BeforeValidator(_checked_stop), Field(max_length=MAX_STOP_STRINGS), _STOP] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=256)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    """llama.cpp's and Ollama's window of penalties; here it is all tokens (-1)."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    timings: bool | None = None
    speculation: bool | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None

    def check(self) -> None:
        """Raise ApiError for options that contradict each other."""
        if self.stream_options is not None and not self.stream:
            raise bad_request(
                "'stream_options' is only allowed when 'stream' is true.", "stream_options", "invalid_value"
            )
        penalties = (self.presence_penalty or 0, self.frequency_penalty or 0, self.repetition_penalty or 1)
        if self.repeat_last_n not in (None, -1) and penalties != (0, 0, 1):
            raise bad_request(
                "'repeat_last_n' is not supported by this server with a penalty; leave it out or set it to -1.",
                "repeat_last_n",
                "unsupported_parameter",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise bad_request(
                "'prompt_logprobs' is not available when 'stream' is true.", "prompt_logprobs", "invalid_value"
            )

    def sampling(
        self,
        max_tokens: int,
        vocab_size: int,
        defaults: SamplingDefaults,
        logprobs: int | None,
        grammar: str | None = None,
        prompt_logprobs: int | None = None,
    ) -> list[SamplingParams]:
        """Parameters of each of the n sequences. Raises ApiError for token ids outside the vocabulary.

        Sequences of a seeded request get the seeds seed, seed + 1, ...
        """
        min_tokens = self.min_tokens or 0
        if min_tokens > max_tokens:
            raise bad_request(
                f"Invalid 'min_tokens': {min_tokens} is more than the {max_tokens} tokens that may be generated.",
                "min_tokens",
                "value_out_of_range",
            )
        for token_id in self.stop_token_ids or ():
            _check_token_id(token_id, vocab_size, "stop_token_ids")
        top_p = defaults.top_p if self.top_p is None else self.top_p
        first = SamplingParams(
            max_tokens=max_tokens,
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            # OpenAI takes 0 and means the most likely token alone, which the smallest positive number says as well.
            top_p=max(top_p, 1e-9),
            top_k=max(defaults.top_k if self.top_k is None else self.top_k, 0),
            min_p=defaults.min_p if self.min_p is None else self.min_p,
            seed=self.seed,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=(
                defaults.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
            ),
            min_tokens=min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            logit_bias=_logit_bias(self.logit_bias or {}, vocab_size),
            logprobs=logprobs,
            grammar=grammar,
            prompt_logprobs=prompt_logprobs,
            speculation=self.speculation is not False,
        )
        count = self.n or 1
        if self.seed is None or count == 1:
            return [first] * count
        return [msgspec.structs.replace(first, seed=_wrapped(self.seed + choice)) for choice in range(count)]


def _wrapped(seed: int) -> int:
    """The seed wrapped into 64 bits."""
    return (seed + 2**63) % 2**64 - 2**63


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    result = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit()):
            raise bad_request(
                f"Invalid key in 'logit_bias': {key[:32]!r}; expected a token id.", "logit_bias", "invalid_value"
            )
        token_id = int(key[:20])
        _check_token_id(token_id, vocab_size, "logit_bias")
        result[token_id] = float(bias)
    return result


def _check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if token_id >= vocab_size:
        raise bad_request(
            f"Invalid '{param}': {token_id} is not a token id; the vocabulary has {vocab_size} tokens.",
            param,
            "value_out_of_range",
        )
