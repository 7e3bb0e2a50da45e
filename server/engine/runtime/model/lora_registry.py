"""The LoRA adapters that are loaded, by name and slot, and how they come and go while requests run."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.checkpoint.lora import AdapterFactors, AdapterWeights, VocabularyChange, check_divisible, read_adapter
from server.checkpoint.sharding.shards import Part
from server.config import EngineConfig
from server.engine.runtime.model.lora_names import AdapterNames
from server.engine.runtime.model.lora_table import AdapterTable, projections_of
from server.engine.runtime.model.lora_vocabulary import VocabularyTables, tables_of
from server.engine.scheduling.sequence import LoadedAdapter
from server.types import AdapterResult, LoadAdapter

logger = logging.getLogger(__name__)

LEAST_RUNTIME_RANK = 16


@dataclass(frozen=True)
class _Read:
    """The result of reading an adapter's folder."""

    request: LoadAdapter
    weights: AdapterWeights | None
    error: str = ""


class AdapterRegistry:
    """Loaded adapters. Use from the engine's thread only; folders are read in threads of their own."""

    def __init__(
        self, names: AdapterNames, table: AdapterTable, vocabulary: VocabularyTables, dtype: torch.dtype
    ) -> None:
        self._names = names
        self._table = table
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._loaded: dict[str, LoadedAdapter] = {}
        self._numbers = itertools.count()
        self._done: queue.SimpleQueue[_Read] = queue.SimpleQueue()
        self.num_reading = 0
        """Folders that are being read."""
        self.on_write: Callable[[int, str], None] | None = None
        """Called with the slot and the folder of every adapter that put() loads from a folder, for other ranks."""

    @property
    def slots(self) -> int:
        """Number of adapters that there is room for."""
        return self._table.slots

    @property
    def names(self) -> list[str]:
        """Loaded adapters, oldest first."""
        return list(self._loaded)

    def get(self, name: str) -> LoadedAdapter:
        """The adapter of this name. Raises ValueError when none is loaded."""
        if name not in self._loaded:
            raise ValueError(f"the adapter {name!r} is not loaded")
        return self._loaded[name]

    def put(self, name: str, weights: AdapterWeights, in_use: Collection[int] = (), path: str | None = None) -> None:
        """Load weights under name, in the place of the adapter that has it; in_use are slots that sequences use.

        path: the folder that the weights are from, where every rank has to load them. Sequences of a replaced adapter go on
        with it. Raises CheckpointError when the weights are another base's, or no slot is free.
        """
        factors, changes = self._checked(name, weights)
        kept = {adapter.slot for other, adapter in self._loaded.items() if other != name}
        free = [slot for slot in range(self._table.slots) if slot not in kept and slot not in in_use]
        if not free:
            waiting = self._table.slots - len(kept)
            raise CheckpointError(
                f"adapter {name!r}: engine.max_loras ({self._table.slots}) adapters are loaded"
                + (f", or still used by requests that run ({waiting})" if waiting else "")
            )
        self._loaded.pop(name, None)
        self._write(free[0], factors, changes)
        if path is not None and self.on_write is not None:
            self.on_write(free[0], path)
        self._loaded[name] = LoadedAdapter(free[0], f"adapter {next(self._numbers)}".encode())

    def write(self, slot: int, path: Path) -> None:
        """Load the adapter in a folder into a slot, as another rank has done. Raises CheckpointError."""
        self._write(slot, *self._checked(str(path), read_adapter(path, self._dtype)))

    def _checked(
        self, name: str, weights: AdapterWeights
    ) -> tuple[dict[str, AdapterFactors], dict[str, VocabularyChange]]:
        """Give an adapter the model's names. Raises CheckpointError where it is another base's, or cannot be divided."""
        weights = self._names.resolve(f"adapter {name!r}", weights)
        if self._table.is_shard:
            check_divisible(name, weights)
        factors = {module: change for module, change in weights.items() if isinstance(change, AdapterFactors)}
        changes = {module: change for module, change in weights.items() if isinstance(change, VocabularyChange)}
        self._table.check(name, factors)
        self._check_room(name, factors, changes)
        self._vocabulary.check(name, changes)
        return factors, changes

    def _check_room(
        self, name: str, factors: Mapping[str, AdapterFactors], changes: Mapping[str, VocabularyChange]
    ) -> None:
        """Raise CheckpointError if an adapter needs room that there is not; it says all that engine.lora_extra must have."""
        vocabulary, tables = self._vocabulary, tables_of(changes, self._names, self._vocabulary.tied)
        room = {
            "dora": self._table.affine,
            "head": vocabulary.output_layer is not None,
            "embedding": vocabulary.embedding is not None,
        }
        needed = {
            "dora": any(change.is_affine for change in factors.values()),
            "head": self._names.output_layer in tables,
            "embedding": self._names.embedding in tables,
        }
        if any(needed[kind] and not has for kind, has in room.items()):
            kinds = ", ".join(kind for kind, has in room.items() if has or needed[kind])
            raise CheckpointError(
                f"adapter {name!r}: DoRA, trained biases and changes of the embedding or the output layer need room that is"
                f" made at the start: set engine.lora_extra to [{kinds}]"
            )

    def _write(self, slot: int, factors: dict[str, AdapterFactors], changes: dict[str, VocabularyChange]) -> None:
        self._table.write(slot, factors)
        self._vocabulary.write(slot, changes)

    def remove(self, name: str) -> None:
        """Forget an adapter; its slot is free once no sequence uses it. Unknown names are ignored."""
        self._loaded.pop(name, None)

    def read(self, request: LoadAdapter) -> None:
        """Start reading an adapter's folder; settle() loads it once it is read."""
        self.num_reading += 1
        threading.Thread(target=self._read, args=(request,), name="adapter-reader", daemon=True).start()

    def settle(self, in_use: Collection[int]) -> list[AdapterResult]:
        """Load what has been read since the last call."""
        results = []
        while not self._done.empty():
            read = self._done.get()
            self.num_reading -= 1
            name, error = read.request.name, read.error
            if read.weights is not None:
                try:
                    self.put(name, read.weights, in_use, read.request.path)
                    logger.info("adapter %s loaded from %s", name, read.request.path)
                except CheckpointError as e:
                    error = str(e)
            results.append(AdapterResult(name, error or None))
        return results

    def _read(self, request: LoadAdapter) -> None:
        try:
            read = _Read(request, read_adapter(Path(request.path), self._dtype))
        except CheckpointError as e:
            read = _Read(request, None, str(e))
        except Exception as e:
            logger.exception("reading the adapter %s failed", request.name)
            read = _Read(request, None, f"{request.path}: cannot be read: {type(e).__name__}: {e}")
        self._done.put(read)


def install_adapters(
    model: PreTrainedModel, config: EngineConfig, parts: Mapping[str, Part] | None = None
) -> AdapterRegistry | None:
    """Make room for config's adapters beside model's projections and load them; None where config has none.

    parts: of a shard, what it has of every linear layer; it gets as much of the adapters.
    Raises CheckpointError for an adapter that cannot be served.
    """
    if config.lora_slots == 0:
        return None
    decoder = model.get_decoder()
    names = AdapterNames(model, projections_of(model, decoder))
    weights: dict[str, AdapterWeights] = {
        module.name: names.resolve(module.path, read_adapter(module.path, model.dtype))
        for module in config.lora_modules
    }
    factors = [change for one in weights.values() for change in one.values() if isinstance(change, AdapterFactors)]
    least = [LEAST_RUNTIME_RANK] if config.allow_runtime_lora else [1]
    rank = config.max_lora_rank or max([change.rank for change in factors] + least)
    # Adapters that come later may have any targets.
    targets = None if config.allow_runtime_lora else {module for adapter in weights.values() for module in adapter}
    affine = "dora" in config.lora_extra or any(change.is_affine for change in factors)
    table = AdapterTable(model, decoder, config.lora_slots, rank, targets, affine, parts)
    tied = bool(model.config.get_text_config().tie_word_embeddings)
    vocabulary = {module for adapter in weights.values() for module in tables_of(adapter, names, tied)}
    extra = {"embedding": names.embedding, "head": names.output_layer}
    vocabulary |= {module for kind, module in extra.items() if module is not None and kind in config.lora_extra}
    tables = VocabularyTables(model, names, vocabulary, config.lora_slots)
    registry = AdapterRegistry(names, table, tables, model.dtype)
    for name, adapter in weights.items():
        registry.put(name, adapter)
    return registry
