"""libnf4_cuda.so: loaded with ctypes, and the structs of csrc/params.h. load_error() says why it cannot be used."""

from __future__ import annotations

import ctypes
import dataclasses
import functools

import torch

from nf4_kernels.cuda.device import too_old
from nf4_kernels.cuda.device_clock import Clocks
from nf4_kernels.gated_delta_params import Nf4GatedDelta
from nf4_kernels.library_files import cuda_library
from nf4_kernels.params import Nf4Weight, size_error
from nf4_kernels.plan import Mma, Rows, Wgmma
from nf4_kernels.plan.moe import MoeWarps, MoeWgmma
from nf4_kernels.plan.moe_rows import MoeRows


class Linear(ctypes.Structure):
    """Nf4Linear of params.h."""

    _fields_ = (
        ("weight", Nf4Weight),
        ("x", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("constant_weights", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
        ("clock", ctypes.c_void_p),
        ("residual", ctypes.c_void_p),
        ("norm_weight", ctypes.c_void_p),
        ("norm_eps", ctypes.c_float),
        ("tiles", ctypes.c_void_p),
        ("activation", ctypes.c_int32),
        ("out_tile", ctypes.c_int32),
    )


class AllReduce(ctypes.Structure):
    """Nf4AllReduce of params.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "out")),
        ("count", ctypes.c_int64),
        ("buffers", ctypes.c_void_p * 8),
        *((name, ctypes.c_int32) for name in ("dtype", "rank", "ranks", "fatal", "ll128")),
        ("stream", ctypes.c_void_p),
    )


class DecodeAttention(ctypes.Structure):
    """Nf4DecodeAttention of params.h."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                *("cache", "query", "key", "value", "out", "numbers", "items", "tables", "sums", "weights", "arrived"),
                *("cosines", "sines", "query_norm", "key_norm"),
            )
        ),
        *((f"{name}_{step}", ctypes.c_int64) for name in ("query", "key", "value") for step in ("token", "head")),
        *((name, ctypes.c_float) for name in ("scale", "eps", "offset")),
        *(
            (name, ctypes.c_int32)
            for name in (
                *("item_count", "counted", "pitch", "kv_heads", "group", "tile_rows", "dtype"),
                *("warps", "stages", "per_processor"),
            )
        ),
        ("stream", ctypes.c_void_p),
    )


class Moe(ctypes.Structure):
    """Nf4Moe of params.h."""

    _fields_ = (
        ("weight", Nf4Weight),
        *((name, ctypes.c_void_p) for name in ("x", "experts", "bias", "routing", "out", "workspace")),
        ("tokens", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("top_k", "num_experts", "x_of_choices", "dtype", "activation")),
        ("follows_gated", ctypes.c_int32),
        ("stream", ctypes.c_void_p),
    )


Launched = Rows | Wgmma | Mma | MoeRows | MoeWarps | MoeWgmma
"""Choices that are launches of this library."""
_FUNCTIONS: dict[type[Launched], str] = {
    **{Rows: "nf4_cuda_linear_rows", Wgmma: "nf4_cuda_linear_wgmma", Mma: "nf4_cuda_linear_mma"},
    **{MoeRows: "nf4_cuda_moe_rows", MoeWarps: "nf4_cuda_moe_warps", MoeWgmma: "nf4_cuda_moe_wgmma"},
}
_PLANS = {
    plan: type(
        f"{plan.__name__}Plan",
        (ctypes.Structure,),
        {"_fields_": tuple((field.name, ctypes.c_int32) for field in dataclasses.fields(plan))},
    )
    for plan in _FUNCTIONS
}
"""Structs of params.h whose fields are a plan's, in its order."""

STRUCTS: dict[str, type[ctypes.Structure]] = {
    "Nf4Weight": Nf4Weight,
    "Nf4Linear": Linear,
    "Nf4Clocks": Clocks,
    "Nf4AllReduce": AllReduce,
    "Nf4DecodeAttention": DecodeAttention,
    "Nf4Moe": Moe,
    "Nf4GatedDelta": Nf4GatedDelta,
    **{struct.__name__: struct for struct in _PLANS.values()},
}
"""Mirrors of the structs of params.h and gated_delta.h."""


_NO_KERNEL = 209
"""cudaErrorNoKernelImageForDevice."""


class KernelError(RuntimeError):
    """A kernel could not be launched; the message holds CUDA's."""


@functools.cache
def library() -> ctypes.CDLL | str:
    """The loaded library, compiled if there was none and there is a GPU, or why it could not be loaded."""
    path = cuda_library()
    if isinstance(path, str):
        return path
    try:
        loaded = ctypes.CDLL(str(path))
        _declare(loaded)
    except (OSError, AttributeError) as e:
        return f"{path} cannot be loaded: {e}"
    if error := size_error(loaded.nf4_cuda_struct_size, STRUCTS):
        return f"{path} cannot be used: {error}"
    return loaded


def _declare(loaded: ctypes.CDLL) -> None:
    """Tell ctypes what the functions take and give. AttributeError where the library lacks one: it is an older one."""
    pointer, int32, int64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    loaded.nf4_cuda_error.restype = ctypes.c_char_p
    loaded.nf4_cuda_struct_size.restype = int64
    loaded.nf4_cuda_struct_size.argtypes = (ctypes.c_char_p,)
    loaded.nf4_cuda_dequantize.argtypes = (ctypes.POINTER(Nf4Weight), int64, int64, pointer, int32, *[pointer] * 3)
    loaded.nf4_cuda_all_reduce.argtypes = (ctypes.POINTER(AllReduce),)
    loaded.nf4_cuda_decode_attention.argtypes = (ctypes.POINTER(DecodeAttention),)
    loaded.nf4_cuda_ipc_buffer_create.argtypes = (int32, int32, ctypes.POINTER(pointer), ctypes.c_char_p)
    loaded.nf4_cuda_is_linked.argtypes = (ctypes.POINTER(int32),)
    loaded.nf4_cuda_ipc_buffer_open.argtypes = (ctypes.c_char_p, ctypes.POINTER(pointer))
    loaded.nf4_cuda_ipc_buffer_close.argtypes = (pointer,)
    loaded.nf4_cuda_ipc_buffer_free.argtypes = (pointer,)
    loaded.nf4_cuda_ipc_buffer_set_timeout.argtypes = (pointer, ctypes.c_uint64)
    loaded.nf4_cuda_ipc_buffer_hung_rank.argtypes = (pointer, ctypes.POINTER(int32))
    loaded.nf4_cuda_clock_end.argtypes = (pointer, pointer)
    loaded.nf4_cuda_clock_completion.argtypes = (pointer, pointer, int32, pointer)
    loaded.nf4_cuda_clock_collect.argtypes = (ctypes.POINTER(Clocks), pointer, pointer)
    for plan, name in _FUNCTIONS.items():
        arguments = Linear if plan in (Rows, Wgmma, Mma) else Moe
        for end in ("", "_timed") if plan in (Rows, Wgmma) else ("",):
            function = getattr(loaded, name + end)
            function.argtypes = (ctypes.POINTER(arguments), ctypes.POINTER(_PLANS[plan]))
    loaded.nf4_cuda_route.argtypes = (*[pointer] * 3, int64, *[int32] * 5, pointer)
    loaded.nf4_cuda_route_linear.argtypes = (*[pointer] * 4, int64, *[int32] * 6, pointer)
    loaded.nf4_cuda_gated_delta.argtypes = (ctypes.POINTER(Nf4GatedDelta),)


@functools.cache
def load_error() -> str | None:
    """None where the CUDA kernels can be used; else why not."""
    if torch.cuda.is_available() and (reason := too_old(torch.device("cuda", torch.cuda.current_device()))) is not None:
        return reason
    loaded = library()
    if isinstance(loaded, str):
        return loaded
    if not torch.cuda.is_available():
        return "torch sees no CUDA GPU"
    if status := loaded.nf4_cuda_has_code():
        error = loaded.nf4_cuda_error(status).decode()
        if status != _NO_KERNEL:
            return f"{cuda_library()} cannot be used: {error} (CUDA error {status})"
        return f"{cuda_library()} was compiled for other GPUs ({error}): python -m nf4_kernels.build --native"
    return None


def usable() -> ctypes.CDLL:
    """The loaded library; KernelError where it cannot be loaded."""
    loaded = library()
    if isinstance(loaded, str):
        raise KernelError(loaded)
    return loaded


def raise_for(loaded: ctypes.CDLL, status: int, what: str) -> None:
    """KernelError for a status that is not cudaSuccess."""
    if status:
        raise KernelError(f"{what}: {loaded.nf4_cuda_error(status).decode()} (CUDA error {status})")


def launch(choice: Launched, arguments: Linear | Moe, timed: bool = False) -> None:
    """Launch what was chosen. timed: the instance that times its decoding, of Rows and Wgmma. Raises KernelError."""
    loaded = usable()
    function = getattr(loaded, _FUNCTIONS[type(choice)] + ("_timed" if timed else ""))
    status = function(arguments, _PLANS[type(choice)](*dataclasses.astuple(choice)))
    raise_for(loaded, status, str(choice))
