"""The CUDA kernels for mixtures of experts: checks arguments, and calls libnf4_cuda.so on torch's current stream.

Source: csrc/cuda/moe/. Which experts are chosen is read on the device alone, so everything here can be captured in CUDA
graphs; workspaces are tensors whose size follows from shapes. takes() says what may be routed here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels import reference
from nf4_kernels.cuda import BLOCKSIZES
from nf4_kernels.cuda.device import arch
from nf4_kernels.cuda.grouped import can_group, grouped_linear
from nf4_kernels.cuda.launches import aligned
from nf4_kernels.cuda.library import Moe, MoeRowsPlan, MoeWarpsPlan, MoeWgmmaPlan, load_error, raise_for, usable
from nf4_kernels.format import Weight, second_level
from nf4_kernels.params import DTYPES, EXPERT_ACTIVATIONS, Nf4Weight
from nf4_kernels.plan.moe import MoeGrouped, MoePlan, MoeWarps, plan_moe
from nf4_kernels.plan.moe_rows import MoeRows


def takes(x: Tensor, shape: Sequence[int], blocksize: int, top_k: int, gated: bool) -> bool:
    """Whether these kernels can compute experts' GEMMs of x with weights of that shape [E, N, K]."""
    if not x.is_cuda or x.dtype not in (torch.float16, torch.bfloat16) or load_error() is not None:
        return False
    tokens = x.shape[0]
    if tokens == 0 or len(shape) != 3 or blocksize not in BLOCKSIZES:
        return False
    sizes = tuple(int(size) for size in shape)
    return plan_on(x.device, tokens, top_k, sizes, blocksize, False, gated, False) is not None


def run(
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    bias: Tensor | None,
    routing: Tensor | None,
    activation: str | None,
    choice: MoePlan | None = None,
    follows_gated: bool = False,
) -> Tensor:
    """moe.moe_linear(), or with an activation moe_gated_linear(): see reference.moe_linear().

    x is bfloat16 or float16, bias has x's dtype. choice: the launch to use instead of the plan's. follows_gated: see moe.py.
    Experts outside [0, E) give zeros. ValueError names what does not fit; KernelError is raised as by cuda.linear().
    """
    tokens, top_k, num_experts, n, k = _check(x, weight, experts, bias, routing, activation)
    columns = n if activation is None else n // 2
    device = x.device
    out = torch.empty((tokens, n) if routing is not None else (tokens, top_k, columns), dtype=x.dtype, device=device)
    if not out.numel() or k == 0 or num_experts == 0:
        return out.zero_()
    if choice is None:
        choice = plan_on(device, tokens, top_k, tuple(weight.shape), weight.blocksize, weight.absmax_8bit is not None,
                         activation is not None, routing is not None)  # fmt: skip
        if choice is None:
            raise ValueError(
                f"no CUDA kernel takes experts of shape {list(weight.shape)} in blocks of {weight.blocksize}"
            )
    struct = _struct(weight, num_experts, n, k)
    if isinstance(choice, MoeGrouped):
        with torch.cuda.device(device):
            return _grouped(choice, x, weight, experts, bias, routing, activation)
    x, experts = aligned(x), experts.contiguous()
    bias = None if bias is None else aligned(bias)
    routing = None if routing is None else routing.contiguous()
    _launch(choice, out, x, struct, num_experts, experts, bias, routing, activation, follows_gated)
    return out


def _grouped(
    choice: MoeGrouped,
    x: Tensor,
    weight: Weight,
    experts: Tensor,
    bias: Tensor | None,
    routing: Tensor | None,
    activation: str | None,
) -> Tensor:
    """run() by grouped_linear(), with torch's operations after it."""
    results = grouped_linear(x.contiguous(), weight, experts, choice).view(*experts.shape, -1)
    ids = experts.long()
    unknown = (ids < 0) | (ids >= weight.shape[0])
    if bias is not None:
        results += bias[ids.masked_fill(unknown, 0)]
    # Rows of choices whose expert is elsewhere may hold anything, NaN included.
    results.masked_fill_(unknown.unsqueeze(-1), 0)
    if activation is not None:
        return reference.gated(results, activation)
    return results if routing is None else reference.weighted_sum(results, routing.masked_fill(unknown, 0))


def _launch(
    choice: MoePlan,
    out: Tensor,
    x: Tensor,
    weight: Nf4Weight,
    num_experts: int,
    experts: Tensor,
    bias: Tensor | None,
    routing: Tensor | None,
    activation: str | None,
    follows_gated: bool,
) -> None:
    """Compute run() into out, of operands that have been checked."""
    (tokens, top_k), k = experts.shape, x.shape[-1]
    size = choice.workspace_bytes(tokens * top_k, x.numel() // k, num_experts, weight.n, k, routing is not None)
    with torch.cuda.device(x.device):
        workspace = torch.empty(size, dtype=torch.uint8, device=x.device)
        moe = Moe(
            weight=weight,
            x=x.data_ptr(),
            experts=experts.data_ptr(),
            bias=None if bias is None else bias.data_ptr(),
            routing=None if routing is None else routing.data_ptr(),
            out=out.data_ptr(),
            workspace=workspace.data_ptr(),
            tokens=tokens,
            top_k=top_k,
            num_experts=num_experts,
            x_of_choices=x.ndim == 3,
            dtype=DTYPES[x.dtype],
            activation=0 if activation is None else EXPERT_ACTIVATIONS[activation],
            follows_gated=follows_gated,
            stream=torch.cuda.current_stream(x.device).cuda_stream,
        )
        loaded = usable()
        if isinstance(choice, MoeRows):
            status = loaded.nf4_cuda_moe_rows(moe, MoeRowsPlan(**dataclasses.asdict(choice)))
        elif isinstance(choice, MoeWarps):
            status = loaded.nf4_cuda_moe_warps(moe, MoeWarpsPlan(**dataclasses.asdict(choice)))
        else:
            status = loaded.nf4_cuda_moe_wgmma(moe, MoeWgmmaPlan(**dataclasses.asdict(choice)))
        raise_for(loaded, status, str(choice))


@functools.lru_cache(maxsize=4096)
def plan_on(
    device: torch.device,
    tokens: int,
    top_k: int,
    shape: tuple[int, ...],
    blocksize: int,
    nested: bool,
    gated: bool,
    routed: bool,
) -> MoePlan | None:
    """plan_moe() for a CUDA device of this machine."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    experts, n, k = shape
    return plan_moe(
        tokens, top_k, experts, n, k, arch(device), multiprocessors, blocksize, nested, gated, routed, can_group()
    )


def _check(
    x: Tensor, weight: Weight, experts: Tensor, bias: Tensor | None, routing: Tensor | None, activation: str | None
) -> tuple[int, int, int, int, int]:
    """tokens, top_k, E, N and K. ValueError names what does not fit."""
    if len(weight.shape) != 3:
        raise ValueError(f"shape must be [E, N, K], got {list(weight.shape)}")
    num_experts, n, k = weight.shape
    if x.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"x must be float16 or bfloat16, got {x.dtype}")
    if experts.ndim != 2 or experts.dtype != torch.int32 or experts.device != x.device:
        raise ValueError(
            f"experts must be int32 [tokens, top_k] on {x.device}, got {experts.dtype} {tuple(experts.shape)}"
        )
    tokens, top_k = experts.shape
    if tuple(x.shape) not in ((tokens, k), (tokens, top_k, k)):
        raise ValueError(f"x has shape {tuple(x.shape)}; it must be [{tokens}, {k}] or [{tokens}, {top_k}, {k}]")
    if activation is not None:
        reference.check_expert_gate(n, activation)
    if bias is not None and (bias.shape != (num_experts, n) or bias.dtype != x.dtype or bias.device != x.device):
        raise ValueError(f"bias must be {x.dtype} of shape {(num_experts, n)} on {x.device}")
    if routing is not None and (
        routing.shape != experts.shape or routing.dtype != torch.float32 or routing.device != x.device
    ):
        raise ValueError(f"routing_weights must be float32 of shape {tuple(experts.shape)} on {x.device}")
    return tokens, top_k, num_experts, n, k


def _struct(weight: Weight, experts: int, n: int, k: int) -> Nf4Weight:
    """The C interface's view of the first expert's weight; the others follow it in memory.

    ValueError names what does not fit.
    """
    if weight.blocksize not in BLOCKSIZES:
        raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {weight.blocksize}")
    device, count = weight.packed.device, experts * n * k
    blocks = -(-count // weight.blocksize)
    tensors = {"packed": (weight.packed, torch.uint8, (count + 1) // 2)}
    stride = 0
    if weight.absmax_8bit is None:
        tensors["absmax"] = weight.absmax, torch.float32, blocks
    else:
        absmax_8bit, absmax_code, absmax_offset, stride = second_level(weight)
        tensors |= {
            "absmax": (weight.absmax, torch.float32, -(-blocks // 256)),
            "absmax_8bit": (absmax_8bit, torch.uint8, blocks),
            "absmax_code": (absmax_code, torch.float32, 256),
            "absmax_offset": (absmax_offset, torch.float32, 1),
        }
    for name, (tensor, dtype, elements) in tensors.items():
        if tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
        if tensor.device != device or device.type != "cuda":
            raise ValueError(f"{name} is on {tensor.device}; all weights must be on one CUDA device")
        if tensor.numel() < elements:
            raise ValueError(f"{name} has {tensor.numel()} elements, the weights need {elements}")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
        if name not in ("absmax_offset",) and tensor.data_ptr() % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes")
    return Nf4Weight(
        **{name: tensor.data_ptr() for name, (tensor, _, _) in tensors.items()},
        n=n,
        k=k,
        blocksize=weight.blocksize,
        offset_stride=stride,
    )
