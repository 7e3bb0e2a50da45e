"""nf4-server fits MODEL: whether a model fits a GPU, and how many tokens its KV cache holds there.

The memory plan of a start, by the headers of the weight files, before weights are fetched or loaded.
"""

from __future__ import annotations

import sys

import torch

from server.checkpoint.base import CheckpointError
from server.checkpoint.diagnosis import first_line
from server.checkpoint.images import IMAGE_TYPES
from server.checkpoint.source import inspect_model
from server.config import Config, EngineConfig
from server.engine.planning import OUTPUT_LAYER_IN_NF4, UNPLANNED, StartMemory, described, plan_on
from server.engine.runtime.limits import own_limit
from server.engine.runtime.memory import RESERVED_SHARE, reserve
from server.engine.runtime.preparation.plan import Memory, economical

SIZES = (8, 12, 16, 24, 32, 48, 80)
"""Memory of GPUs, in GiB."""
_OTHER_BYTES = int(0.8 * 2**30)
"""About what CUDA, torch and the kernels hold on a GPU."""


def idle(total: int) -> Memory:
    """The memory of a GPU of `total` bytes that nothing else uses, as a start finds it."""
    return Memory(total - _OTHER_BYTES, total, int(total * RESERVED_SHARE))


def fits(config: Config, gpu_memory: int | None) -> int:
    """Print the plan on a GPU of gpu_memory bytes, else on this machine's, else a line for each of SIZES.

    Returns 0 where the model fits, else 1.
    """
    try:
        return _fits(config, gpu_memory)
    except CheckpointError as e:
        print(f"error: {e}", file=sys.stderr)
    except UNPLANNED as e:
        print(f"error: {config.model}: no memory plan: {first_line(e)}", file=sys.stderr)
    return 1


def _fits(config: Config, gpu_memory: int | None) -> int:
    engine = config.engine
    info = inspect_model(config.model, config.cache_dir, lambda stage, _: print(stage, file=sys.stderr))
    model, draft = described(info), None
    if engine.speculation == "draft" and engine.draft_model is not None:
        draft = described(inspect_model(engine.draft_model, config.cache_dir, lambda *_: None))
    device, ranks = torch.device("cuda", 0), engine.tensor_parallel_size
    ranks = 1 if ranks == "auto" else ranks

    own = own_limit(model[1].get_text_config())

    def planned(memory: Memory, config: EngineConfig) -> StartMemory:
        return plan_on(memory, device, config, model, draft, info.model_type in IMAGE_TYPES, ranks)

    if gpu_memory is not None:
        memory, where = idle(gpu_memory), f"a GPU of {gpu_memory / 2**30:g} GiB"
    elif torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info(device)
        memory, where = Memory(free, total, reserve(device, total)), torch.cuda.get_device_name(device)
    else:
        return _compare([(size, planned(idle(size * 2**30), engine)) for size in SIZES])
    found = planned(memory, engine)
    print(f"on {where}{f', each of {ranks}' if ranks > 1 else ''}; {_explained(found, engine, own)}")
    plan, least = found.plan, planned(memory, economical(engine, ranks)).plan
    assert plan is not None
    assert least is not None
    if plan.fits:
        return 0
    print(f"With all of these it {f'fits: {least.tokens:,} tokens' if least.fits else 'does not fit either'}.")
    return 1


def _explained(start: StartMemory, asked: EngineConfig, own: int | None) -> str:
    plan = start.plan
    assert plan is not None
    lines = [plan.table()]
    if asked.quantize_output_layer == "auto" and start.config.quantize_output_layer == "nf4":
        lines.append(OUTPUT_LAYER_IN_NF4)
    longest = min(plan.tokens, asked.max_model_len or own or plan.tokens)
    if plan.fits:
        lines.append(f"It fits. A request may have up to {longest:,} tokens, all that run together {plan.tokens:,}.")
    else:
        missing = (plan.needed - plan.memory.free) / 2**30
        lines.append(f"It does not fit: {missing:.2f} GiB are missing for {plan.wanted:,} tokens in the KV cache.")
    return "\n".join([*lines, start.advice])


def _compare(starts: list[tuple[int, StartMemory]]) -> int:
    plans = [(size, start.plan) for size, start in starts if start.plan is not None]
    print(f"weights: {plans[-1][1].weights / 2**30:.2f} GiB; tokens in the KV cache by a GPU's memory:")
    for size, plan in plans:
        print(f"{size:4} GiB  {f'{plan.tokens:,}' if plan.fits else 'does not fit':>14}")
    print("--gpu-memory 12GiB says more of one")
    return 0 if any(plan.fits for _, plan in plans) else 1
