"""Work of the device between the graphs of two steps: results go to the host, and the next step's inputs come from it.

Both read or write the host's pinned memory themselves. A copy by the copy engine takes 4 to 8 us of the stream, and its
launch takes the host as long as a kernel's.
"""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from server.engine.runtime.attention.graph_backend import HostLayout

_NUMBERS = 1024


def lay_out(
    inputs: torch.Tensor,
    given: torch.Tensor,
    newest: torch.Tensor | None,
    placeholder: int,
    layout: HostLayout | None,
) -> None:
    """Fill a graph's inputs, int64 [3, size], and write what layout holds to the device.

    given: int64 [4, size] in pinned memory: ids, positions, slots, and the place in newest of each id that is the
    placeholder. newest: int64 on the device; None: there is no placeholder.
    """
    size = inputs.shape[1]
    if layout is None:
        # The kernel is compiled for these types.
        own, other = inputs.view(torch.int32), given.view(torch.int32)
        layout = HostLayout(own, other, 0, own, given, 0)
    most = max(3 * size, layout.count, layout.changed)
    _lay_out[(triton.cdiv(most, _NUMBERS),)](
        inputs,
        given,
        given if newest is None else newest,
        size,
        layout.numbers,
        layout.pinned,
        layout.count,
        layout.tables,
        layout.new,
        layout.changed,
        layout.new.shape[1],
        placeholder,
        newest is not None,
        _NUMBERS,
    )


# Compiled twice, not anew for sizes of 1 or multiples of 16: steps would wait for it.
@triton.jit(do_not_specialize=["size", "count", "changed", "capacity"])  # type: ignore[untyped-decorator]
def _lay_out(  # type: ignore[no-untyped-def]
    inputs,
    given,
    newest,
    size,
    numbers,
    layout,
    count,
    tables,
    new,
    changed,
    capacity,
    placeholder: tl.constexpr,
    follows: tl.constexpr,
    width: tl.constexpr,
):
    at = tl.program_id(0) * width + tl.arange(0, width)
    value = tl.load(given + at, mask=at < 3 * size, other=0)
    own = tl.load(layout + at, mask=at < count, other=0)
    place = tl.load(new + at, mask=at < changed, other=0)
    block = tl.load(new + capacity + at, mask=at < changed, other=0)
    if follows:
        unknown = (at < size) & (value == placeholder)
        source = tl.load(given + 3 * size + at, mask=unknown, other=0)
        value = tl.where(unknown, tl.load(newest + source, mask=unknown, other=0), value)
    tl.store(inputs + at, value, mask=at < 3 * size)
    tl.store(numbers + at, own, mask=at < count)
    tl.store(tables + place, block.to(tl.int32), mask=at < changed)


def post(
    best: torch.Tensor,
    tokens: torch.Tensor,
    copied: torch.Tensor,
    totals: torch.Tensor | None,
    times: torch.Tensor | None,
) -> torch.Tensor:
    """Write best, float32 [S], and tokens, int64 [S], to copied, float32 [2 * S] or more; a copy of tokens on the device.

    totals: int64, written to times. copied and times are in pinned memory.
    """
    count = len(tokens)
    own = torch.empty_like(tokens)
    words = 0 if totals is None else totals.numel()
    _post[(triton.cdiv(max(count, words), _NUMBERS),)](
        best, tokens, own, copied, count, totals if words else tokens, times if words else own, words, _NUMBERS
    )
    return own


@triton.jit(do_not_specialize=["count", "words"])  # type: ignore[untyped-decorator]
def _post(best, tokens, own, copied, count, totals, times, words, width: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * width + tl.arange(0, width)
    value = tl.load(best + at, mask=at < count, other=0.0)
    token = tl.load(tokens + at, mask=at < count, other=0)
    total = tl.load(totals + at, mask=at < words, other=0)
    tl.store(copied + at, value, mask=at < count)
    tl.store(copied + count + at, token.to(tl.float32), mask=at < count)
    tl.store(own + at, token, mask=at < count)
    tl.store(times + at, total, mask=at < words)
