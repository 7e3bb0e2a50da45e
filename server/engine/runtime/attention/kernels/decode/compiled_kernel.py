"""Use of nf4_kernels' compiled kernel in decode steps, and the room that a step has by the kernel that attends."""

from __future__ import annotations

import torch

from nf4_kernels.cuda import decode_attention as kernel
from nf4_kernels.cuda.decode_attention import Instance
from server.engine.runtime.attention.kernels.decode.key_parts import PER_PROCESSOR, PER_PROCESSOR_LATENT, Room
from server.engine.runtime.attention.kernels.kv_cache import Kind


def can_attend(kind: Kind, dtype: torch.dtype, block_size: int, device: torch.device) -> bool:
    """Whether the compiled kernel computes the attention of layers of a kind, with a cache of dtype."""
    plain = kind.options.softcap is None and not kind.options.sinks
    return (
        plain
        and not kind.is_latent
        and kernel.can_attend(device, dtype, block_size, kind.heads, kind.kv_heads, kind.dim)
    )


class Rooms:
    """The room of each window's launches, which goes by the kernel that attends and by how many sequences a step has."""

    def __init__(
        self, processors: int, kv_heads: list[int], compiled: list[bool], split: bool, latent: bool = False
    ) -> None:
        """kv_heads, compiled: of each window's layers, the most key heads and whether the compiled kernel attends.

        latent: whether layers keep latents; then kv_heads are groups of query heads.
        """
        self._per_processor = PER_PROCESSOR_LATENT if latent else PER_PROCESSOR
        self._processors, self._kv_heads, self._compiled, self._split = processors, kv_heads, compiled, split
        self._known: dict[tuple[int, bool, Instance | None], list[Room]] = {}
        self.form: Instance | None = None
        """The form that the compiled kernel has in any step; None: the one for the step's sequences."""
        most = max(instance.per_processor for instance in kernel.INSTANCES)
        largest = [self._room_by(heads, most) for heads, own in zip(kv_heads, compiled, strict=True) if own]
        self.most_spare = max(room.spare for room in [*self.of(1, True), *largest]) if split else 0
        """Room.spare of the step that has most."""

    def instance(self, window: int, sequences: int, shared: bool) -> Instance | None:
        """The form of the compiled kernel by which a window's layers attend; None: they do by the Triton kernel."""
        if shared or not self._compiled[window]:
            return None
        return self.form or kernel.instance_for(sequences, self._kv_heads[window], self._processors)

    def forms(self, window: int) -> list[Instance | None]:
        """The forms by which a window's layers attend in some step; [None]: they attend by the Triton kernel."""
        return list(kernel.INSTANCES) if self._compiled[window] else [None]

    def of(self, sequences: int, shared: bool) -> list[Room]:
        """The rooms of a step of so many tokens, which may be of one sequence where shared."""
        step = sequences, shared, self.form
        found = self._known.get(step)
        if found is None:
            found = self._known[step] = [self._room(window, sequences, shared) for window in range(len(self._kv_heads))]
        return found

    def _room(self, window: int, sequences: int, shared: bool) -> Room:
        instance, heads = self.instance(window, sequences, shared), self._kv_heads[window]
        room = self._room_by(heads, None if instance is None else instance.per_processor)
        return room if self._split else Room(room.wave, 0)

    def _room_by(self, kv_heads: int, per_processor: int | None) -> Room:
        """The room of a launch by the compiled kernel, with so many thread blocks a multiprocessor; None: by Triton's."""
        if per_processor is None:
            return Room.of(self._processors, kv_heads, self._per_processor)
        room = Room.of(self._processors, kv_heads, per_processor)
        return Room(room.wave, min(room.spare, kernel.MOST_PARTS - 1))
