"""The CUDA kernels for mixtures of experts: calls libnf4_cuda.so on torch's current stream.

Source: csrc/cuda/moe/. Which experts are chosen is read on the device alone, so everything here can be captured in CUDA
graphs; workspaces are tensors whose size follows from shapes. takes() says what may be routed here.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from nf4_kernels import reference
from nf4_kernels.cuda import BLOCKSIZES, struct_of
from nf4_kernels.cuda.device import arch
from nf4_kernels.cuda.grouped import can_group, grouped_linear
from nf4_kernels.cuda.launches import aligned
from nf4_kernels.cuda.library import Moe, launch, load_error
from nf4_kernels.format import Weight
from nf4_kernels.params import DTYPES, EXPERT_ACTIVATIONS, Nf4Weight
from nf4_kernels.plan.moe import MoeGrouped, MoePlan, MoeWarps, MoeWgmma, plan_moe
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
    """moe.moe_linear(), or with an activation moe_gated_linear(), of arguments that moe.py has checked.

    x is bfloat16 or float16. choice: the launch to use instead of the plan's. follows_gated: see moe.py. Experts outside
    [0, E) give zeros. ValueError names what is wrong with the weight; KernelError is raised as by cuda.linear().
    """
    (num_experts, n, k), (tokens, top_k) = weight.shape, experts.shape
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
    # The C interface's view of the first expert's weight; the others follow it in memory.
    struct = struct_of(weight, num_experts * n, k)
    struct.n = n
    for name in ("packed", "absmax", "absmax_8bit", "absmax_code"):
        if (getattr(struct, name) or 0) % 16:
            raise ValueError(f"{name} must begin at a multiple of 16 bytes")
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
    choice: MoeRows | MoeWarps | MoeWgmma,
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
        launch(choice, moe)


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
