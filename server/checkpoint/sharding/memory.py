"""Bytes that a shard's weights take, by the names and shapes of a checkpoint's tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from transformers import PreTrainedModel

from nf4_kernels.format import NESTED_BLOCKSIZE
from server.checkpoint.experts.names import described, place_of
from server.checkpoint.inspection import CheckpointInfo
from server.checkpoint.sharding.experts import ExpertsPart
from server.checkpoint.sharding.shards import Part, Shard

_LAYER = re.compile(r".*\blayers\.(\d+)\.")


def shard_bytes(
    info: CheckpointInfo,
    model: PreTrainedModel,
    parts: Mapping[str, Part],
    experts: Mapping[str, ExpertsPart],
    names: Mapping[str, str],
    shard: Shard,
    item_bytes: int,
) -> int:
    """Bytes of a shard once it is loaded, zeros behind widths and expanded scales included.

    model: the empty shard; parts and experts: what it has of these modules, by their names in it. names: the model's
    names of tensors, by their names in the files. item_bytes: of each number that is not quantized.
    """
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    vocabulary = {name: module for name, module in model.named_modules() if any(module is end for end in ends)}
    by_layer = {int(found[1]): part for name, part in experts.items() if (found := _LAYER.match(name))}
    hidden = model.config.get_text_config().hidden_size
    total = 0.0
    for name in info.tensors:
        weight = described(name)
        module = names.get(weight, weight).rpartition(".")[0]
        place = place_of(weight)
        if place is not None and place.layer in by_layer:
            own = by_layer[place.layer]
            # The ops of experts take nested scales of whole groups only.
            plain = place.part == "down" or own.inner * hidden % (shard.blocksize * NESTED_BLOCKSIZE) != 0
            total += info.tensor_bytes(name, item_bytes, plain=plain) * own.inner / own.whole
        elif module in vocabulary:
            rows, *others = vocabulary[module].weight.shape
            if name == weight:  # it is expanded where it is in NF4
                total += len(shard.rows_of(int(rows))) * math.prod(others) * item_bytes
        elif module in parts:
            part = parts[module]
            skips = part.is_partial and name.endswith(".nested_absmax")  # it has blocks of all groups
            share = 1.0 if skips else math.prod(part.shape) / math.prod(part.whole)
            total += info.tensor_bytes(name, item_bytes) * share
        else:
            total += info.tensor_bytes(name, item_bytes)
    return int(total)
