"""The interface of attention backends, and how transformers' model code reaches the one in use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from transformers import AttentionInterface

from nf4_kernels.reference import tile_activations, tiles_shape
from server.engine.runtime.attention.rotary import RotaryEmbedding
from server.engine.runtime.batch import Batch, Spans

IMPLEMENTATION = "nf4_paged"
"""The name under which transformers knows our attention function."""
PROBED_IMPLEMENTATION = "nf4_paged_probed"
"""The same, for a model whose masks are looked at."""
PLANS_AHEAD = 4
"""Steps of graphs that may be laid out before the copies of the first of these layouts to the device are over."""


class UnsupportedModelError(Exception):
    """The model's attention is not one that the engine can compute; the message is one line."""


@dataclass(frozen=True)
class LayerShape:
    """Keys and values of one layer."""

    kv_heads: int
    key_dim: int
    value_dim: int
    heads: int = 1
    """The number of query heads; only backends that plan a step before they attend need it."""

    def bytes_per_token(self, itemsize: int) -> int:
        """Cache bytes that one token takes in this layer."""
        return self.kv_heads * (self.key_dim + self.value_dim) * itemsize


@dataclass(frozen=True)
class AttentionOptions:
    """How one layer attends. Query i sees key j when j <= i and, with a window, j > i - window.

    softcap: scores become softcap * tanh(scores / softcap). sinks: each query head sees one more key, whose score is a
    number of that head and whose value is zero; the backend has the numbers (AttentionBackend.sinks).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


class AttentionBackend(ABC):
    """Owns the cache of every layer and attends over it. One forward pass: begin(batch), then attend() per layer."""

    runs_compiled_layers = False
    """Whether the decoder layers may be compiled, which takes attend_next()."""
    sinks: Mapping[int, torch.Tensor] = MappingProxyType({})
    """The sinks of the layers whose options say that they have some, by layer: each query head's, float32 [heads]."""
    windows: Mapping[int, int | None] = MappingProxyType({})
    """The windows that layers' masks would have had, by layer; a layer that is not here has the one it is called with."""

    @abstractmethod
    def begin(self, batch: Batch) -> None:
        """Prepare what all layers of the coming forward pass share."""

    @abstractmethod
    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Write the batch's keys and values into the layer's cache and attend.

        query [T, heads, key_dim], key [T, kv_heads, key_dim], value [T, kv_heads, value_dim] for the batch's T tokens,
        any strides with a contiguous last dimension; returns [T, heads, value_dim].
        """

    def see_sinks(self, layer: int, sinks: torch.Tensor) -> None:  # noqa: B027 - most need not know
        """Called before attend() in a layer that has sinks, [heads], unless the layer is compiled."""

    def see_mask(self, layer: int, module: str, mask: torch.Tensor) -> None:
        """Called before attend(), with the name of the layer's module, in a layer that is called with a mask."""
        raise UnsupportedModelError(f"{module} has a mask of its own, which the paged attention ignores")

    def attend_next(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """attend() for the layer after the last one that attended, as compiled model code calls it."""
        raise UnsupportedModelError(f"{type(self).__name__} does not run compiled layers")

    def attend_rotary_next(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rotary: RotaryEmbedding, tile: int = 0
    ) -> torch.Tensor:
        """Do as attend_next() does, for a query and a key that get their rotary embedding first.

        tile: where it is not 0, the result is [T, heads * dim] as tiled activations, see result_shape(); in the last tile,
        tokens beyond T may hold anything.
        """
        out = self.attend_next(*rotary.apply(query, key), value)
        tokens, heads, dim = out.shape
        return out if tile == 0 else tile_activations(out.flatten(1), tile).view(result_shape(tokens, heads, dim, tile))


@dataclass(frozen=True)
class DecodeForm:
    """What a decode graph asks of a launch that attends; a kernel is compiled for each form."""

    rotary: bool
    """Whether the launch computes rotary embeddings."""
    norms: bool
    """Whether it normalises queries and keys in front of them."""
    tile: int
    """Tokens of a tile of the result; 0: the result is not tiled."""


@dataclass(frozen=True)
class HostLayout:
    """A decode step's layout in pinned memory, and where it goes on the device."""

    numbers: torch.Tensor
    """int32, on the device: pinned's first `count` numbers go there."""
    pinned: torch.Tensor
    count: int
    tables: torch.Tensor
    """int32, on the device: block tables."""
    new: torch.Tensor
    """int64 [2, any], pinned: in its first `changed` columns places in the flat tables, and the blocks that go there."""
    changed: int
    forget: Callable[[], None] = lambda: None
    """To be called where it could not be written: what is new in the tables counts as written."""

    def write(self) -> None:
        """Copy it to the device."""
        self.numbers[: self.count].copy_(self.pinned[: self.count], non_blocking=True)
        if self.changed:
            # A row at a time, since copies of what is not contiguous would wait for the device.
            places, blocks = (row[: self.changed].to(self.tables.device, non_blocking=True) for row in self.new)
            self.tables.view(-1).index_copy_(0, places, blocks.int())


class GraphBackend(AttentionBackend):
    """A backend whose forward passes can be captured in CUDA graphs.

    A graph's kernels read where a step's keys are from memory of the backend's own. plan_decode_graph() and
    plan_mixed_graph() write a step's layout there, once before the capture and then before every replay. While a graph
    is captured, begin_decode_graph() or begin_mixed_graph() takes the place of begin().
    """

    scratch_block: int
    """A KV block of no sequence: padding writes its keys and values there."""
    longest_in_mixed_graph: int
    """Tokens that a sequence of a mixed step may have for it to run as a graph."""

    @property
    @abstractmethod
    def applies_rotary(self) -> bool:
        """Whether decode graphs compute norms and rotary embeddings in the launch that attends."""

    @abstractmethod
    def set_up_graphs(
        self, max_model_len: int, max_num_seqs: int, split_keys: bool, forms: Collection[DecodeForm] = ()
    ) -> None:
        """Prepare for graphs of up to max_num_seqs sequences of up to max_model_len tokens; call before any plan.

        forms: those that decode graphs are likely to ask for, so that their kernels can be compiled side by side.
        split_keys: whether a sequence's keys may be divided among thread blocks, which depends on how many and how long
        the step's sequences are and so changes the order of sums.
        """

    @abstractmethod
    def plan_decode_graph(self, spans: Spans, size: int, shared: bool = False) -> None:
        """Lay out a step of one-token sequences for the graph of size sequences; those beyond spans are padding.

        shared: as the graph was captured. Where it is, spans may be tokens of one sequence, one after another, side by side
        and in the same row of the block tables. The copies to the device of the plan that is PLANS_AHEAD plans old must be
        over.
        """

    def host_layout(self, spans: Spans, size: int, shared: bool = False) -> HostLayout | None:
        """Do as plan_decode_graph() does, but leave it to the caller to write the layout to the device, at once.

        None: plan_decode_graph() has done it.
        """
        self.plan_decode_graph(spans, size, shared)
        return None

    def advance_decode_graph(
        self, inputs: torch.Tensor, tokens: torch.Tensor, shifts: torch.Tensor | None = None
    ) -> bool:
        """Lay out the step behind the one that has been laid out last, in which the host plays no part but to launch.

        The first len(tokens) sequences go on by one token each, or by as many as shifts says, int64 on the device. tokens:
        int64, their newest ones; inputs: int64 [3, size], the graph's ids, positions and slots, which are advanced, too.
        The host's block tables must have room for them, and must have had it at the last plan. False, with nothing done,
        where only plan_decode_graph() can do so.
        """
        return False

    @abstractmethod
    def begin_decode_graph(self, slots: torch.Tensor, shared: bool = False) -> None:
        """Capture the decode graph of len(slots) sequences; slots is the buffer that the graph will read.

        shared: its tokens may be of one sequence, one after another; each attends to those in front of it.
        """

    @abstractmethod
    def plan_mixed_graph(self, spans: Spans, size: int, sequences: int) -> Any:
        """Lay out a step for the graph of `size` tokens and `sequences` sequences; returns begin_mixed_graph()'s plan.

        The first plan of a size must have size tokens. No sequence may be longer than longest_in_mixed_graph.
        """

    @abstractmethod
    def begin_mixed_graph(self, slots: torch.Tensor, plan: Any) -> None:
        """Capture the mixed graph that plan was made for; slots is the buffer that the graph will read."""


def result_shape(tokens: int, heads: int, dim: int, tile: int) -> tuple[int, ...]:
    """[tokens, heads, dim], or with a tile the shape of nf4_kernels.reference.tile_activations([tokens, heads * dim], tile).

    Raises ValueError where tiles would need columns of padding, which attention kernels do not write.
    """
    if tile == 0:
        return tokens, heads, dim
    if heads * dim % 256 != 0:
        raise ValueError(f"heads * dim is {heads} * {dim}, and tiles need a multiple of 256")
    return tiles_shape(tokens, heads * dim, tile)


class _Active:
    """The backend of the forward pass that is running; the engine runs one at a time."""

    backend: AttentionBackend | None = None


@contextmanager
def attending(backend: AttentionBackend) -> Iterator[None]:
    """Make transformers' model code attend through backend while entered."""
    previous, _Active.backend = _Active.backend, backend
    try:
        yield
    finally:
        _Active.backend = previous


def is_attending(backend: AttentionBackend) -> bool:
    """Whether a forward pass runs that attends through this backend."""
    return _Active.backend is backend


@torch.library.custom_op("nf4_server::attend", mutates_args=())
def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    assert _Active.backend is not None
    return _Active.backend.attend_next(query, key, value)


@torch.library.custom_op("nf4_server::attend_rotary", mutates_args=())
def _attend_rotary(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    tile: int = 0,
) -> torch.Tensor:
    assert _Active.backend is not None
    norms = None if query_norm is None or key_norm is None else (query_norm, key_norm)
    rotary = RotaryEmbedding(cos, sin, norms, eps, offset)
    return _Active.backend.attend_rotary_next(query, key, value, rotary, tile)


@_attend.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[1], value.shape[2])


@_attend_rotary.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    offset: float,
    tile: int = 0,
) -> torch.Tensor:
    return query.new_empty(result_shape(query.shape[0], query.shape[1], value.shape[2], tile))


# The nodes of inductor's graphs that call these operations have them as targets.
ATTEND, ATTEND_ROTARY = torch.ops.nf4_server.attend.default, torch.ops.nf4_server.attend_rotary.default


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers: query [1, heads, T, dim] to [1, T, heads, dim]."""
    if torch.compiler.is_compiling():
        # The layer's index stays out of the compiled code, so that one compilation serves all layers.
        rows = (t[0].transpose(0, 1) for t in (query, key, value))
        return torch.ops.nf4_server.attend(*rows).unsqueeze(0), None
    backend = _Active.backend
    if backend is None:
        raise RuntimeError("the model was called outside attending()")
    for name in ("position_bias", "head_mask", "cache"):
        if others.get(name) is not None:
            raise UnsupportedModelError(f"{type(module).__name__} uses {name}, which the paged attention does not have")
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(
            f"{type(module).__name__} attends to later tokens, too, and so cannot generate here"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModelError(f"{type(module).__name__} does not say which layer it is")
    if attention_mask is not None:
        backend.see_mask(layer, type(module).__name__, attention_mask)
    if s_aux is not None:
        backend.see_sinks(layer, s_aux)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scaling, backend.windows.get(layer, sliding_window), softcap, s_aux is not None)
    # Batch 1 always: all tokens of a forward pass are one row.
    out = backend.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), options)
    return out.unsqueeze(0), None


# No mask function of the first name is registered, and so transformers builds no masks.
AttentionInterface.register(IMPLEMENTATION, _paged_attention)
AttentionInterface.register(PROBED_IMPLEMENTATION, _paged_attention)
