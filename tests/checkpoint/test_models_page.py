"""docs/models.md says what the tests have tried, neither more nor less."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from server.checkpoint.images import IMAGE_TYPES
from tests.checkpoint import (
    models_page,
    test_inspection,
    test_layouts,
    test_loading,
    test_lora_adapters,
    test_multimodal,
    test_source,
)
from tests.checkpoint import test_tokenizer_files as tokenizers
from tests.checkpoint.further_families import FURTHER
from tests.checkpoint.test_classes import HYBRIDS
from tests.checkpoint.test_hybrids import MODELS
from tests.engine.model import test_image_prompts, test_lora, test_lora_kinds, test_moe
from tests.engine.model.test_lora_kinds import KINDS

PAGE = models_page.PAGE
ROW = re.compile(r"^\| (?P<what>[^|]+) \| (?P<answer>works|text only|refused)", re.MULTILINE)
Tests = tuple[str | Callable[..., Any], ...]

LAYOUTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "NF4, scales nested or plain": ("works", test_layouts.test_scales_nested_and_plain),
    "NF4 codes stored as bfloat16": ("works", test_layouts.test_codes_stored_as_bfloat16),
    "NF4 under a config.json that does not say so": (
        "works",
        test_layouts.test_nf4_tensors_under_a_config_that_does_not_say_so,
    ),
    "quantization_config without quant_method": ("works", test_layouts.test_bitsandbytes_fields_without_a_method),
    "quantization_config in the text part": ("works", test_multimodal.test_a_quantization_config_in_the_text_part),
    "layers in 16 bit among NF4": ("works", test_layouts.test_layers_in_16_bit_that_no_skip_list_names),
    "skip lists of modules and in old names": ("works", test_multimodal.test_skip_lists_of_modules_and_in_old_names),
    "a tied output layer in NF4": ("works", test_layouts.test_a_tied_output_layer_that_was_quantized),
    "a tied output layer that the skip list forgets": (
        "works",
        test_layouts.test_a_tied_output_layer_that_the_skip_list_forgets,
    ),
    "prefixes of other versions": ("works", test_multimodal.test_names_of_other_versions),
    "FP4, on GPUs expanded to 16 bit while loading": ("works", test_layouts.test_fp4),
    "16 or 32 bit, quantized while loading": ("works", test_loading.test_a_16_bit_model_is_quantized_while_loading),
    "tekken.json as the only tokenizer": ("works", tokenizers.test_mistrals_tekken_is_converted),
    "tokenizer.model as the only tokenizer, without its package": (
        "refused",
        tokenizers.test_a_vocabulary_that_takes_a_package_names_it,
    ),
    "bitsandbytes' 8 bit, GPTQ, AWQ and others": (
        "refused",
        test_inspection.test_other_quantizations_are_refused_by_name,
    ),
    "GGUF": ("refused", test_source.test_a_gguf_file_or_folder_is_named_with_what_to_do),
}
ADAPTERS: dict[str, tuple[str, Tests]] = {
    "LoRA, rsLoRA, rank and alpha patterns on projections": (
        "works",
        (test_lora.test_adapters_and_base_in_one_batch, "a fused base"),
    ),
    "DoRA, also of the output layer and the embedding": (
        "works",
        (
            "DoRA",
            "DoRA beside biases",
            "rank-stabilized DoRA",
            "DoRA of both",
            "DoRA, tied",
            "DoRA of a scaled embedding",
        ),
    ),
    "trained biases": ("works", ("biases of all", "biases of adapted")),
    "a bias of the adapter (lora_bias)": ("works", ("biases of the adapter",)),
    "modules_to_save: output layer, embedding": (
        "works",
        ("whole output layer", "whole embedding", "both whole", "both whole, tied", "whole scaled embedding"),
    ),
    "LoRA on the output layer or the embedding": (
        "works",
        ("output layer", "embedding", "both, tied", "scaled embedding"),
    ),
    "trainable_token_indices": ("works", ("tokens", "tokens, tied")),
    "names of other versions and of multimodal classes": ("works", (test_lora_kinds.test_names_of_other_classes,)),
    "q, k, v, gate and up on a base that fuses them": ("works", (test_lora_kinds.test_parts_of_a_fused_projection,)),
    "fused names on a base that does not fuse them": (
        "works",
        (test_lora_kinds.test_a_fused_projection_on_a_base_that_has_its_parts,),
    ),
    "modules_to_save of norms and projections": (
        "refused",
        (test_lora_kinds.test_what_is_not_served_is_refused_by_name,),
    ),
    "a trained bias of the output layer": ("refused", (test_lora_kinds.test_what_is_not_served_is_refused_by_name,)),
    "experts, by names of each or by target_parameters": (
        "refused",
        (
            test_moe.test_adapters_of_attention_work_and_those_of_experts_are_refused_by_name,
            test_lora_adapters.test_configurations_that_are_not_plain_lora_are_refused_by_name,
        ),
    ),
    "vocabularies of another size": ("refused", (test_lora_kinds.test_what_is_not_served_is_refused_by_name,)),
    "DoRA, biases and tables at run time, without room from the start": (
        "refused",
        (test_lora_kinds.test_room_is_made_at_the_start,),
    ),
    "PiSSA and others that change the base, other tuners": (
        "refused",
        (test_lora_adapters.test_configurations_that_are_not_plain_lora_are_refused_by_name,),
    ),
}


def rows(title: str) -> dict[str, str]:
    """Read what the table under a title says of each thing."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    return {match["what"].strip("` "): match["answer"] for match in ROW.finditer(section)}


def test_tables_of_families_are_the_tests_lists() -> None:
    """Neither a row that no test runs nor a tested family without one: python -m tests.checkpoint.models_page."""
    page = PAGE.read_text(encoding="utf-8")
    if not all(family in CONFIG_MAPPING for family in FURTHER):
        pytest.skip(f"transformers {transformers.__version__} does not have all families of the page")
    assert models_page.written(page) == page
    assert {name.partition(",")[0] for name in test_image_prompts.PICTURES} == IMAGE_TYPES


def test_hybrids() -> None:
    text_only = {name for name, settings in MODELS.items() if "vision_config" in settings and name not in IMAGE_TYPES}
    served = {name: "text only" if name in text_only else "works" for name in MODELS}
    assert rows("Hybrids") == dict.fromkeys(HYBRIDS, "refused") | served


def test_layouts_on_the_page() -> None:
    assert rows("Layouts") == {name: answer for name, (answer, _) in LAYOUTS.items()}


def test_adapters() -> None:
    assert rows("Adapters") == {name: answer for name, (answer, _) in ADAPTERS.items()}
    named = [test for _, tests in ADAPTERS.values() for test in tests if isinstance(test, str)]
    assert sorted(named) == sorted(KINDS)
