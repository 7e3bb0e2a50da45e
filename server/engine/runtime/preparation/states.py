"""Layers with states: the sequences that their memory allows, and mixers in the places of transformers' own."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import PreTrainedModel

from server.checkpoint.loading import available_bytes
from server.checkpoint.states import NARROW_INPUTS, attends, has_states, kinds_of_layers, state_modules
from server.config import EngineConfig
from server.engine.runtime.attention.base import UnsupportedModelError
from server.engine.runtime.exchange import least
from server.engine.runtime.layers.stateful.gated_delta import read_rule
from server.engine.runtime.layers.stateful.mamba2 import read_mamba2
from server.engine.runtime.layers.stateful.short_convolution import read_convolution
from server.engine.runtime.layers.stateful.state_layers import StateLayers, StateRule
from server.engine.runtime.limits import (
    CPU_CACHE_BYTES,
    EngineConfigError,
    MemoryTooSmallError,
    sequence_limit,
    token_budget,
)
from server.engine.runtime.memory import is_out_of_memory, reserve, settle
from server.engine.runtime.model.projections import plain_linear
from server.engine.runtime.preparation.estimates import step_bytes
from server.engine.runtime.states.pool import StatePool

logger = logging.getLogger(__name__)

_KV_TOKENS = 1024
"""Tokens for which every sequence should find room in the KV cache, before more sequences get states."""
_SNAPSHOTS_OF_ONE = 0.5
"""Snapshots for each sequence that may run."""
_MIN_SNAPSHOTS = 2
"""Snapshots that one sequence gets, too: a conversation's last one is found while the next one is taken."""
_WRAPPED = (
    "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "mamba2_chunk_scan",
)  # fmt: skip
"""Functions of transformers' that call other kernels where these are installed."""
_CERTAIN = 0.9
"""The share of the memory for states and the KV cache that states of several sequences count with: a step is an estimate."""


def keep_in_16_bits(model: PreTrainedModel) -> None:
    """Expand projections with one output for each head, and with one alone, if they are in NF4.

    Kernels compute no fewer than 64 rows.
    """
    narrow = [(module, name) for module in state_modules(model) for name in NARROW_INPUTS]
    for module, name in [*narrow, *((module, "shared_expert_gate") for module in model.modules())]:
        linear = getattr(module, name, None)
        if isinstance(linear, Linear4bit):
            setattr(module, name, plain_linear(linear, model.dtype))


def make_states(model: PreTrainedModel, bytes_per_block: int, config: EngineConfig) -> StateLayers | None:
    """The layers of a model that have states, which these compute from here on; None: there are none.

    The model's projections are in their final form. bytes_per_block: of the KV cache. Raises UnsupportedModelError, and
    MemoryTooSmallError where the memory holds no state.
    """
    if not has_states(model.config.get_text_config()):
        return None
    modules = state_modules(model)
    rules: list[StateRule | None] = [_read(module) for module in modules]
    found = [rule for rule in rules if rule is not None]
    if len(found) < len(modules):
        other = modules[rules.index(None)]
        names = ", ".join(name for name, _ in other.named_children())
        raise UnsupportedModelError(f"{type(other).__name__} has {names}, which no rule describes")
    kinds = [rule.kind for rule in found]
    slots = _slots(sum(kind.nbytes for kind in kinds), bytes_per_block, model, config)
    on_host = (
        config.state_snapshot_host_bytes // sum(kind.nbytes for kind in kinds) if config.enable_prefix_caching else 0
    )
    own = slots.sequences, model.device, slots.snapshots, states_of_one(config) > 1
    try:
        pool = StatePool(kinds, *own, least(on_host))
    except RuntimeError as e:
        if is_out_of_memory(e) or not on_host:
            raise
        raise EngineConfigError(f"engine.state_snapshot_host_bytes is {config.state_snapshot_host_bytes}: {e}") from e
    mixers = {
        module: rule.mixer(module, pool, index) for index, (module, rule) in enumerate(zip(modules, found, strict=True))
    }
    states = StateLayers(pool, mixers)
    for module, mixer in mixers.items():
        module.forward = mixer.by_modules().forward
    _report(states, sum(attends(kind) for kind in kinds_of_layers(model.config)))
    return states


def _read(module: nn.Module) -> StateRule | None:
    return read_rule(module) or read_convolution(module) or read_mamba2(module)


def _report(states: StateLayers, attending: int) -> None:
    pool = states.pool
    names = " and ".join(f"{count} {name}" for name, count in Counter(kind.name for kind in pool.kinds).items())
    each = sum(kind.nbytes for kind in pool.kinds)
    logger.info(
        "%s layers of %.3g MB a sequence, %d of attention; states of %d sequences and %d snapshots take %.2f GiB; %d"
        " snapshots in host memory",
        names, each / 1e6, attending, pool.max_num_seqs, len(pool.snapshots), pool.nbytes / 2**30, len(pool.host_snapshots),
    )  # fmt: skip


class StateSlots(NamedTuple):
    """Number of states that there is memory for."""

    sequences: int
    snapshots: int


def states_of_one(config: EngineConfig) -> int:
    """States of each sequence: a second one is kept while draft tokens are verified."""
    return 1 if config.speculation == "off" else 2


def state_slots(
    state: int, token: float, usable: int, cache: int | None, config: EngineConfig, wanted: int
) -> StateSlots:
    """Number of `wanted` sequences that run at a time, each with `state` bytes beside its KV blocks, and of snapshots.

    token: bytes of a token in the KV cache. usable: bytes for states and the KV cache; cache: of these the cache's, if that
    is fixed. Fewer sequences than wanted, down to 0, if states would leave them less than _KV_TOKENS each.
    """
    own = state * states_of_one(config)
    snapshots, share = 0, 0.0
    if config.enable_prefix_caching and config.state_snapshot_bytes is None:
        share = _SNAPSHOTS_OF_ONE
    elif config.enable_prefix_caching:
        snapshots = (config.state_snapshot_bytes or 0) // state
        usable -= snapshots * state
    each = own + share * state
    longest = (config.max_model_len or _KV_TOKENS) * token
    if cache is None:
        # The longest sequence has to fit, too.
        several = min(usable / (each + _KV_TOKENS * token), (usable * _CERTAIN - longest) / each)
        possible = int(max(several, min(1, (usable - longest) / own)))
    else:
        possible = int((usable - cache) / each)
    count = min(wanted, max(0, possible))
    if share:
        free = usable * _CERTAIN - longest if cache is None else usable - cache
        spare = int((free - count * own) / state)
        snapshots = max(int(count * share), min(_MIN_SNAPSHOTS, spare), 0)
    return StateSlots(count, snapshots)


def _slots(state: int, bytes_per_block: int, model: PreTrainedModel, config: EngineConfig) -> StateSlots:
    """The slots of a model whose weights are loaded. Raises MemoryTooSmallError."""
    device, wanted = model.device, sequence_limit(config, model.device)
    usable, cache = _usable(model, config)
    own = state_slots(state, bytes_per_block / config.block_size, usable, cache, config, wanted)
    # Rank 0's scheduler says which slot is whose, so all ranks have the same ones.
    slots = StateSlots(least(own.sequences), least(own.snapshots))
    if slots.sequences < 1:
        raise MemoryTooSmallError(
            f"a sequence's states take {state / 2**20:.0f} MiB, and with the weights, the KV cache and snapshots there is no"
            f" memory for them on {device}"
        )
    if slots.sequences < wanted:
        logger.warning(
            "engine.max_num_seqs is %d instead of %d: a sequence's states take %.0f MiB",
            slots.sequences,
            wanted,
            state / 2**20,
        )
    return slots


def _usable(model: PreTrainedModel, config: EngineConfig) -> tuple[int, int | None]:
    """Bytes for states and the KV cache, and of these the cache's, if that is fixed."""
    device = model.device
    if device.type == "cuda":
        settle(device)
    free = available_bytes(device)
    if device.type == "cuda":
        text = model.config.get_text_config()
        step = step_bytes(text, token_budget(config, device), sequence_limit(config, device))
        return free - step - reserve(device, torch.cuda.mem_get_info(device)[1]), config.kv_cache_bytes
    return free // 2, config.kv_cache_bytes or CPU_CACHE_BYTES


@contextmanager
def own_mixers(states: StateLayers | None) -> Iterator[None]:
    """While entered, layers with states compute by transformers' own code, with torch alone: a sequence from its begin on.

    Other kernels, which transformers uses where it finds them, compile for a minute.
    """
    mixers = {} if states is None else states.mixers
    with ExitStack() as kept:
        for module in mixers:
            kept.callback(setattr, module, "forward", module.forward)
            del module.forward
            _choose_torch(module)
        for source in {sys.modules[type(module).__module__] for module in mixers}:
            for name in _WRAPPED:
                function = getattr(source, name, None)
                if hasattr(function, "__wrapped__"):
                    kept.callback(setattr, source, name, function)
                    setattr(source, name, getattr(function, "__wrapped__"))  # noqa: B009 - mypy knows no such attribute
        yield


def _choose_torch(module: nn.Module) -> None:
    """Make a module of transformers 5.17, which holds its functions, call torch's; newer ones wrap these functions."""
    source = sys.modules[type(module).__module__]
    for name in ("chunk_gated_delta_rule", "recurrent_gated_delta_rule"):
        if hasattr(module, name):
            setattr(module, name, getattr(source, f"torch_{name}"))
    if hasattr(module, "causal_conv1d_fn"):
        module.causal_conv1d_fn = None  # type: ignore[assignment]
