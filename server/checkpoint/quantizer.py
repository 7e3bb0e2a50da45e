"""transformers' 4-bit quantizer with one rule changed: the files say which tensors are packed, and how."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key
from transformers.integrations.bitsandbytes import Bnb4bitDeserialize
from transformers.pytorch_utils import Conv1D
from transformers.quantizers import auto as quantizers
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer

from server.checkpoint.base import CheckpointError
from server.checkpoint.classes import leave_out_towers, narrow_inputs_aside, towers_aside
from server.checkpoint.diagnosis import first_line
from server.checkpoint.inspection import CheckpointInfo
from server.checkpoint.packed import expand, read_packed

logger = logging.getLogger(__name__)

_REGISTERED = "bitsandbytes_4bit"


TakeOver = Callable[[PreTrainedModel, Mapping[str, str]], None]


class TensorRefused(BaseException):
    """A tensor cannot be used; the message is CheckpointError's without the folder."""


class FileQuantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
    """Makes a Linear4bit of exactly those linear layers whose weights the files have in NF4, or FP4 where that is kept.

    Other packed tensors (an embedding) are expanded while loading, and what is in 16 bit stays so. A checkpoint with
    nothing packed is quantized as transformers does it.
    """

    def __init__(
        self,
        info: CheckpointInfo,
        key_mapping: Mapping[str, str] | None,
        take_over: TakeOver,
        towers: bool,
        keeps_fp4: bool,
        quantization_config: BitsAndBytesConfig,
        **options: Any,
    ) -> None:
        """take_over: takes out of a model, before it is loaded, what transformers is not to load, with names_in_model().

        towers: whether the parts that images go through are loaded. keeps_fp4: whether linear layers in FP4 stay so.
        """
        super().__init__(quantization_config, **options)
        self._info = info
        self._key_mapping = key_mapping
        self._take_over = take_over
        self._towers = towers
        self._kept = ("nf4", "fp4") if keeps_fp4 else ("nf4",)

    def __deepcopy__(self, _: Any) -> FileQuantizer:
        # transformers copies it for every tensor, and the list of all tensors with it.
        return self

    def _convert_model_for_quantization(self, model: PreTrainedModel) -> None:
        """Do nothing: transformers would make Llama 4's experts a list of linear layers, but ExpertsLoader loads them."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, device_map: Any, **options: Any) -> None:
        if not self._towers:
            leave_out_towers(model)
        names = names_in_model(self._info, model, self._key_mapping)
        check_shapes(self._info, model, names)
        if not self.pre_quantized:
            with towers_aside(model), narrow_inputs_aside(model):  # what is in 16 bit there stays so
                super()._process_model_before_weight_loading(model, device_map, **options)
        expanded = sum(table not in self._kept for table in self._info.packed.values())
        if expanded:
            logger.warning(
                "%d tensors are in FP4: they are expanded to 16 bit, which takes 4 times the memory", expanded
            )
        for name, table in self._info.packed.items():
            module_name = names.get(name, "").rpartition(".")[0]
            if self.pre_quantized and table in self._kept and module_name:
                storage = _storage_of(self._info.tensors[name][0])
                _make_packed(model, module_name, table, self.quantization_config, storage)
        self._take_over(model, names)

    def get_weight_conversions(self) -> list[Any]:
        """What makes a parameter of a packed tensor and its companions."""
        conversions: list[Any] = super().get_weight_conversions()
        for conversion in conversions:
            own = [_Unpacked(self) if type(op) is Bnb4bitDeserialize else op for op in conversion.operations]
            conversion.operations = own
        return conversions


class _Unpacked(Bnb4bitDeserialize):  # type: ignore[misc]
    def convert(
        self,
        input_dict: dict[str, Any],
        model: nn.Module | None = None,
        full_layer_name: str | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        if len(input_dict) == 1 or model is None or full_layer_name is None:
            return input_dict
        tensors = {key: value[0] if isinstance(value, list) else value for key, value in input_dict.items()}
        module = model.get_submodule(full_layer_name.rpartition(".")[0])
        expected = _shape(module, model.get_parameter(full_layer_name))
        try:
            packed = read_packed(full_layer_name, tensors)
            if packed.shape != expected:
                raise CheckpointError(
                    f"damaged: {full_layer_name} is {list(packed.shape)}, config.json says {list(expected)}"
                )
        except CheckpointError as e:
            raise TensorRefused(str(e)) from e
        if isinstance(module, Linear4bit):
            try:
                done: dict[str, Any] = super().convert(tensors, model=model, full_layer_name=full_layer_name, **options)
            except (AttributeError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as e:
                # transformers would say that there was an error, and leave out where.
                raise TensorRefused(f"damaged: the quant_state of {full_layer_name}: {first_line(e)}") from e
            return done
        weight = expand(packed, model.get_parameter(full_layer_name).dtype)
        return {"weight": weight.T if isinstance(module, Conv1D) else weight}


@contextmanager
def by_file(
    info: CheckpointInfo,
    key_mapping: Mapping[str, str] | None,
    take_over: TakeOver,
    towers: bool,
    keeps_fp4: bool,
) -> Iterator[None]:
    """While entered, transformers quantizes by a FileQuantizer of this checkpoint.

    key_mapping as from_pretrained has it; take_over, towers and keeps_fp4 as FileQuantizer has them.
    """
    registered = quantizers.AUTO_QUANTIZER_MAPPING[_REGISTERED]
    quantizers.AUTO_QUANTIZER_MAPPING[_REGISTERED] = functools.partial(
        FileQuantizer, info, key_mapping, take_over, towers, keeps_fp4
    )
    try:
        yield
    finally:
        quantizers.AUTO_QUANTIZER_MAPPING[_REGISTERED] = registered


def names_in_model(
    info: CheckpointInfo, model: PreTrainedModel, key_mapping: Mapping[str, str] | None
) -> dict[str, str]:
    """The model's names of the tensors that transformers only renames, by their names in the files."""
    state = model.state_dict()
    conversions = get_model_conversion_mapping(model, key_mapping)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    names = {}
    for name in info.tensors:
        found, _ = rename_source_key(name, renamings, [], model.base_model_prefix, state)
        if found not in state:
            found, _ = rename_source_key(name, [], [], model.base_model_prefix, state)
        if found in state:
            names[name] = found
    return names


def check_shapes(info: CheckpointInfo, model: PreTrainedModel, names: Mapping[str, str]) -> None:
    """Raise CheckpointError, by name, for a tensor that is not packed and has another shape than the model's."""
    state = model.state_dict()
    for name, in_model in names.items():
        dtype, shape = info.tensors[name]
        expected = tuple(state[in_model].shape)
        # Files have stacked experts in either order of dimensions; the code that reads them handles both.
        if name in info.packed or shape == expected or len(expected) > 2:
            continue
        hint = "config.json is of another model, or the file is damaged"
        if dtype == "U8":
            hint = "codes of 4 bits without their quant_state: save the checkpoint again with bitsandbytes"
        raise CheckpointError(f"{info.folder}: {name} is {list(shape)}, config.json says {list(expected)}: {hint}")


def _shape(module: nn.Module, parameter: torch.Tensor) -> tuple[int, ...]:
    """The shape that a module's weight has before it is packed, as bitsandbytes' layers hold it."""
    if isinstance(module, Linear4bit):
        return module.out_features, module.in_features
    shape = tuple(parameter.shape)
    return shape[::-1] if isinstance(module, Conv1D) else shape


def _storage_of(dtype: str) -> torch.dtype:
    """The type that codes have in the files: uint8, or one in which bitsandbytes hides them from what casts floats."""
    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}.get(dtype, torch.uint8)


def _make_packed(model: nn.Module, name: str, table: str, config: BitsAndBytesConfig, storage: torch.dtype) -> None:
    """Put a Linear4bit without a weight in the place of a linear layer; other modules stay.

    storage: of its codes; transformers 5.17 casts what it reads to the type that the layer has.
    """
    module = model.get_submodule(name)
    if type(module) not in (nn.Linear, Conv1D):
        return
    n, k = (module.nx, module.nf)[::-1] if isinstance(module, Conv1D) else (module.out_features, module.in_features)
    with torch.device("meta"):
        layer = Linear4bit(
            k, n, module.bias is not None, config.bnb_4bit_compute_dtype, quant_type=table,
            quant_storage=storage,
        )  # fmt: skip
    layer.source_cls = type(module)
    layer.weight.data = layer.weight.data.to(storage)
    model.set_submodule(name, layer.requires_grad_(False))
