"""Random NF4 weights of a given configuration, made on the device layer by layer: for benchmarks and tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import QuantState, create_dynamic_map, get_4bit_type
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nf4_kernels import Weight
from nf4_kernels.format import CODEBOOK, NESTED_BLOCKSIZE
from server.checkpoint.base import CheckpointError, Progress
from server.checkpoint.classes import read_config
from server.checkpoint.experts.layout import ExpertsLayout, experts_layouts, replace_experts
from server.checkpoint.experts.module import NF4Experts, StackedWeight
from server.checkpoint.host_embedding import move_embedding
from server.checkpoint.late import NO_ECONOMIES, Economies, check_untied
from server.checkpoint.sharding.experts import ExpertsPart
from server.checkpoint.sharding.plan import empty_shard
from server.checkpoint.sharding.sharded import ShardedModel
from server.checkpoint.sharding.shards import Part, Shard, check_count
from server.checkpoint.sharding.slices import make_linear
from server.checkpoint.sharding.vocabulary import set_vocabulary
from server.checkpoint.states import NARROW_INPUTS

BLOCKSIZE = 64
# Scales around this make weights with a standard deviation near 0.02, as trained linear layers have.
MEAN_ABSMAX = 0.05
# A router may choose another expert by rounding alone. With experts' results of this share of other layers' a deep model's
# logits depend little on that, as a trained one's do; else they are off by half in bfloat16 (GLM-4.7-Flash's shape).
EXPERTS_SHARE = 0.25
SAMPLED_AT_ONCE = 1 << 26


def dummy_model(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    seed: int,
    economies: Economies = NO_ECONOMIES,
) -> PreTrainedModel:
    """A model of folder's config.json with random weights that seed decides, in eval mode.

    NF4 (blocks of 64, double quantization) in experts and in every linear layer but lm_head and those of the
    configuration's own skip list, dtype elsewhere; economies: what of these is in NF4, too. Nothing that ends in NF4 is ever
    held in 16 bit. Raises CheckpointError when config.json does not describe a causal language model.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config.dtype = dtype
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as e:
        raise CheckpointError(f"{folder}: no model can be made of its config.json: {e}") from e
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        skipped = set(NARROW_INPUTS) if economies.skipped else _skipped(config)
        if economies.output_layer:
            check_untied(folder, model)
            skipped -= {"lm_head"}
        fill_randomly(
            model, device, dtype, progress, lambda name: skipped.isdisjoint(name.split(".")),
            output_layer=economies.output_layer,
        )  # fmt: skip
    model.tie_weights()
    if economies.host_embedding:
        move_embedding(folder, model)
    progress("making random weights", 1.0)
    return model.eval().requires_grad_(False)


def _skipped(config: Any) -> set[str]:
    """Names of modules that a configuration's skip list leaves in 16 bits, and those that stay so in every checkpoint."""
    settings = getattr(config, "quantization_config", None) or {}
    return {*NARROW_INPUTS, *(settings.get("llm_int8_skip_modules") or ())}


def dummy_shard(
    folder: Path, device: torch.device, dtype: torch.dtype, progress: Progress, shard: Shard
) -> ShardedModel:
    """A shard of such a model. Its rank decides what its weights are. Raises CheckpointError as load_shard() does."""
    config = read_config(folder)
    check_count(config, BLOCKSIZE, shard.count, str(folder))
    skipped = _skipped(config)
    empty = empty_shard(config, dtype, replace(shard, blocksize=BLOCKSIZE), folder)
    model, parts = empty.model, empty.parts
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(shard.rank)
        rows = len(shard.rows_of(config.get_text_config().vocab_size))
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            bias = getattr(layer, "bias", None)
            meta = layer.weight.new_empty(rows, layer.weight.shape[1])
            set_vocabulary(layer, meta, None if bias is None else bias.new_empty(rows))
        for name, part in parts.items():
            if not skipped.isdisjoint(name.split(".")):
                continue
            biased = model.get_submodule(name).bias is not None and not (part.is_partial and shard.rank)
            model.set_submodule(name, _random_part(part, biased, device, dtype))
        in_nf4 = {name for name in parts if skipped.isdisjoint(name.split("."))}
        fill_randomly(model, device, dtype, progress, in_nf4.__contains__, experts=empty.experts)
    model.tie_weights()
    progress("making random weights", 1.0)
    return ShardedModel(model.eval().requires_grad_(False), parts, shard, empty.norms)


def fill_randomly(
    model: PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    in_nf4: Callable[[str], bool] = lambda name: True,
    experts: Mapping[str, ExpertsPart] | None = None,
    output_layer: bool = False,
) -> None:
    """Give a model on the meta device random weights on device: experts and linear layers but the head in NF4, the rest in
    dtype.

    in_nf4: of linear layers' names, those that are in NF4. experts: of a shard, what it has of each module of experts.
    output_layer: whether the head is in NF4, too.
    """
    for layout in list(experts_layouts(model)):
        if layout.activation is not None:
            biased = bool(getattr(model.get_submodule(layout.name), "has_bias", False))
            part = (experts or {}).get(layout.name)
            replace_experts(model, layout, _random_experts(layout, device, dtype, biased, part))
    modules = list(model.named_modules())
    head = None if output_layer else model.get_output_embeddings()
    for done, (name, module) in enumerate(modules):
        if isinstance(module, NF4Experts | StackedWeight):
            continue
        if type(module) is nn.Linear and module is not head and in_nf4(name):
            model.set_submodule(name, _random_linear(module, device, dtype))
        elif isinstance(module, Linear4bit):
            continue
        elif any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
            module.to_empty(device=device, recurse=False)
            _fill(module)
            model._init_weights(module)
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
        if done % 32 == 0:
            progress("making random weights", done / len(modules))
    for _, module in modules:
        if isinstance(module, PreTrainedModel):
            # Falcon-H1's sets buffers of its layers.
            model._init_weights(module)
    for _, module in modules:
        _scale_keys(module)
        _scale_experts(module)


def _scale_experts(module: Any) -> None:
    """Give experts' results EXPERTS_SHARE if a norm after them takes away what their weights give (Gemma 4)."""
    weight = getattr(getattr(module, "post_feedforward_layernorm_2", None), "weight", None)
    if hasattr(module, "experts") and isinstance(weight, torch.Tensor) and weight.device.type != "meta":
        weight.data.mul_(EXPERTS_SHARE)


def _scale_keys(module: Any) -> None:
    """Divide attention's scores by the root of a head's size where the norm of keys does so in trained models (Gemma 4).

    Else scores have a deviation of 16, and the rounding of a class's own attention in 16 bits changes all of its text.
    """
    weight = getattr(getattr(module, "k_norm", None), "weight", None)
    if getattr(module, "scaling", None) == 1.0 and isinstance(weight, torch.Tensor) and weight.device.type != "meta":
        weight.data.mul_(weight.shape[0] ** -0.5)


@torch.no_grad()
def _fill(module: nn.Module) -> None:
    """Numbers in a module's own tensors, for those that its model leaves as they are: routers' in some classes."""
    for parameter in module.parameters(recurse=False):
        if parameter.is_floating_point():
            parameter.normal_(std=0.02)
    for buffer in module.buffers(recurse=False):
        buffer.zero_()


def _random_pairs(count: int, device: torch.device) -> torch.Tensor:
    """uint8 [count]: bytes of two codes, each as frequent as in normally distributed weights.

    Codes that are all equally frequent have a mean: a direction, common to all rows, in which every rounding error
    adds up. Trained layers have no such thing.
    """
    pairs = _pairs_by_frequency().to(device)
    packed = torch.empty(count, dtype=torch.uint8, device=device)
    for part in packed.split(SAMPLED_AT_ONCE):
        pair_ids = torch.randint(0, pairs.numel(), part.shape, dtype=torch.int32, device=device)
        torch.index_select(pairs, 0, pair_ids, out=part)
    return packed


@functools.cache
def _pairs_by_frequency() -> torch.Tensor:
    """uint8 [65536]: all pairs of the codes of 256 equally likely weights of a block scaled by its largest."""
    weights = torch.randn(1 << 14, BLOCKSIZE, generator=torch.Generator().manual_seed(0))
    scaled = (weights / weights.abs().amax(1, keepdim=True)).flatten().sort().values
    likely = scaled.view(256, -1).mean(1)
    codes = (likely.unsqueeze(1) - torch.tensor(CODEBOOK)).abs().argmin(1).to(torch.uint8)
    return (codes.unsqueeze(1) << 4 | codes).flatten()


def _random_experts(
    layout: ExpertsLayout, device: torch.device, dtype: torch.dtype, biased: bool, part: ExpertsPart | None = None
) -> NF4Experts:
    """One layer's experts, or a shard's part of them, as they come from a checkpoint with a tensor for each expert."""

    def stacked(
        rows: int, columns: int, biased: bool, is_nested: bool = True, absmax: float = MEAN_ABSMAX
    ) -> StackedWeight:
        shape, size = (layout.count, rows, columns), layout.count * rows * columns
        packed = _random_pairs(size // 2, device)
        bias = torch.zeros(layout.count, rows, dtype=dtype, device=device) if biased else None
        blocks, each = size // BLOCKSIZE, rows * columns // BLOCKSIZE
        scales = torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device)
        code = create_dynamic_map().to(device)
        if each % NESTED_BLOCKSIZE or not is_nested:
            return StackedWeight(Weight(packed, shape, code[scales.long()] * (absmax / 2) + absmax, BLOCKSIZE), bias)
        groups = torch.full((blocks // NESTED_BLOCKSIZE,), absmax, device=device)
        return StackedWeight(Weight(packed, shape, groups / 2, BLOCKSIZE, scales, code, groups), bias)

    assert layout.activation is not None
    gate_up = stacked(layout.rows * layout.inner, layout.hidden, biased)
    # Scales of a part of down are plain, and the first rank adds its bias.
    down = stacked(
        layout.hidden, layout.inner, biased and not (part and part.rank), part is None, MEAN_ABSMAX * EXPERTS_SHARE
    )
    return NF4Experts(gate_up, down, layout.activation)


def _random_linear(linear: nn.Linear, device: torch.device, dtype: torch.dtype) -> Linear4bit:
    n, k = linear.out_features, linear.in_features
    packed = _random_pairs((n * k + 1) // 2, device).unsqueeze(1)
    blocks = -(-n * k // BLOCKSIZE)
    state = _random_state(n, k, -(-blocks // NESTED_BLOCKSIZE), device, dtype)
    layer = Linear4bit(k, n, bias=linear.bias is not None, compute_dtype=dtype, quant_type="nf4", device="meta")
    layer.weight = Params4bit(
        packed, requires_grad=False, quant_state=state, blocksize=BLOCKSIZE, quant_type="nf4", bnb_quantized=True,
        module=layer,
    )  # fmt: skip
    layer.quant_state = state
    layer.compute_type_is_set = True
    if linear.bias is not None:
        layer.bias = nn.Parameter(torch.zeros(n, dtype=dtype, device=device), requires_grad=False)
    return layer


def _random_part(part: Part, biased: bool, device: torch.device, dtype: torch.dtype) -> Linear4bit:
    """A part of a random layer, whose blocks are in the groups that they would have in a whole layer."""
    (n, k), blocks = part.shape, part.whole[1] // BLOCKSIZE
    geometry = (part.columns.start // BLOCKSIZE, blocks - k // BLOCKSIZE) if part.is_partial else (0, 0)
    groups = -(-(n * blocks + part.padding // BLOCKSIZE) // NESTED_BLOCKSIZE)
    bias = torch.zeros(n, dtype=dtype, device=device) if biased else None
    state = _random_state(n, k, groups, device, dtype)
    return make_linear(_random_pairs((n * k + 1) // 2, device), state, geometry, bias, dtype)


def _random_state(n: int, k: int, groups: int, device: torch.device, dtype: torch.dtype) -> QuantState:
    """Nested scales of n * k weights, in `groups` groups."""
    blocks = -(-n * k // BLOCKSIZE)
    nested = QuantState(
        absmax=torch.full((groups,), MEAN_ABSMAX / 2, device=device),
        blocksize=NESTED_BLOCKSIZE,
        code=create_dynamic_map().to(device),
        dtype=torch.float32,
    )
    return QuantState(
        absmax=torch.randint(0, 256, (blocks,), dtype=torch.uint8, device=device),
        shape=torch.Size((n, k)),
        code=get_4bit_type("nf4", device=device),
        blocksize=BLOCKSIZE,
        quant_type="nf4",
        dtype=dtype,
        offset=torch.tensor(MEAN_ABSMAX, device=device),
        state2=nested,
    )
