"""Small random models that take images, with a tokenizer of bytes and the files that say how images are prepared."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import Tokenizer as TokenizerBackend
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from tests.checkpoint.further_families import settings_of, skip_unless_known
from tests.checkpoint.layouts import change_json, config_of, random_model, save_nf4

PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}{{ 'IMAGE' }}{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A chat template that takes contents in parts; IMAGE is what the model's own would write for an image."""


@dataclass(frozen=True)
class Kind:
    """Configuration in the files of a model type's checkpoints."""

    tokens: dict[str, str]
    """Its special tokens, by the tokenizer's names for them."""
    shown: str
    """Text that the chat template writes for an image."""
    processor: dict[str, Any]
    """preprocessor_config.json."""
    settings: dict[str, Any] = field(default_factory=dict)
    """processor_config.json, if it has one."""
    config: dict[str, Any] = field(default_factory=dict)
    """More of config.json."""
    mark: str = ""
    """Text that the processor replaces by an image's tokens; empty: boi_token or image_token."""


_CLIP = {
    "do_resize": True, "size": {"shortest_edge": 28}, "do_center_crop": True, "crop_size": {"height": 28, "width": 28},
}  # fmt: skip
_LLAVA = {
    "patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1,
    "image_token": "<image>",
}  # fmt: skip
_MUSE = Kind(
    {
        "image_token": "<|patch|>", "image_start": "<|image_start|>", "image_end": "<|image_end|>",
        "video_token": "<|video|>",
    },
    "<|patch|>",
    {"image_processor_type": "MuseGlimmerImageProcessor", "max_image_tokens": 20},
    {"processor_class": "MuseGlimmerProcessor"},
)  # fmt: skip
_QWEN = Kind(
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "<|vision_start|><|image_pad|><|vision_end|>",
    {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 20},
)
# Its checkpoints have no processor_config.json.
_QWEN3_5 = replace(
    _QWEN,
    processor={
        "image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor", "patch_size": 14,
        "temporal_patch_size": 2, "merge_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
        "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 20},
    },
)  # fmt: skip
_IDEFICS = Kind(
    {
        "image_token": "<image>", "fake_image_token": "<fake_token_around_image>", "global_image_token": "<global-img>",
        "end_of_utterance_token": "<end_of_utterance>",
        **{f"tile_{row}_{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)},
    },
    "<image>",
    {
        "image_processor_type": "Idefics3ImageProcessor", "size": {"longest_edge": 56},
        "max_image_size": {"longest_edge": 28}, "do_image_splitting": True,
    },
)  # fmt: skip
_GLM = Kind(
    {
        "image_token": "<|image|>", "video_token": "<|video|>", "image_start_token": "<|begin_of_image|>",
        "image_end_token": "<|end_of_image|>", "video_start_token": "<|begin_of_video|>",
        "video_end_token": "<|end_of_video|>",
    },
    "<|begin_of_image|><|image|><|end_of_image|>",
    {
        "image_processor_type": "Glm4vImageProcessor",
        "size": {"shortest_edge": 28 * 28 * 2, "longest_edge": 28 * 28 * 2 * 20},
    },
)  # fmt: skip
_TILES: dict[str, Any] = {
    "image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 28, "width": 28}, "crop_to_patches": True,
    "min_patches": 1, "max_patches": 3,
}  # fmt: skip
_GEMMA_4 = Kind(
    {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>",
        "boa_token": "<|audio>", "eoa_token": "<audio|>", "video_token": "<|video|>",
    },
    "<|image|>",
    {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14, "max_soft_tokens": 70},
    {"processor_class": "Gemma4Processor"},
    {"image_token_id": 0, "video_token_id": 4, "audio_token_id": 5},
    mark="<|image|>",
)  # fmt: skip
KINDS: dict[str, Kind] = {
    "llava": Kind(
        {"image_token": "<image>"},
        "<image>\n",
        {"image_processor_type": "CLIPImageProcessor", **_CLIP},
        {"processor_class": "LlavaProcessor", **_LLAVA},
    ),
    "llava_next": Kind(
        {"image_token": "<image>"},
        "<image>\n",
        {
            "image_processor_type": "LlavaNextImageProcessor",
            **_CLIP,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        {"processor_class": "LlavaNextProcessor", **_LLAVA},
        {"image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]]},
    ),
    "mistral3": Kind(
        {"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"},
        "[IMG]",
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 112}, "patch_size": 14},
        {"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
    ),
    "gemma3": Kind(
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        "<start_of_image>",
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 28, "width": 28}},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
    "gemma4": _GEMMA_4,
    "gemma4_unified": replace(
        _GEMMA_4,
        processor={**_GEMMA_4.processor, "image_processor_type": "Gemma4UnifiedImageProcessor"},
        settings={"processor_class": "Gemma4UnifiedProcessor"},
    ),
    "muse_glimmer": _MUSE,
    "muse_spark": replace(
        _MUSE, tokens={**_MUSE.tokens, "audio_token": "<|audio|>"}, settings={"processor_class": "MuseSparkProcessor"}
    ),
    "idefics3": replace(_IDEFICS, settings={"processor_class": "Idefics3Processor", "image_seq_len": 1}),
    "smolvlm": replace(
        _IDEFICS,
        processor={**_IDEFICS.processor, "image_processor_type": "SmolVLMImageProcessor"},
        settings={"processor_class": "SmolVLMProcessor", "image_seq_len": 1},
    ),
    "qwen2_vl": replace(_QWEN, settings={"processor_class": "Qwen2VLProcessor"}),
    "qwen2_5_vl": replace(_QWEN, settings={"processor_class": "Qwen2_5_VLProcessor"}),
    "qwen3_vl": replace(_QWEN, settings={"processor_class": "Qwen3VLProcessor"}),
    "qwen3_vl_moe": replace(_QWEN, settings={"processor_class": "Qwen3VLProcessor"}),
    "qwen3_5": _QWEN3_5,
    "qwen3_5_moe": _QWEN3_5,
    "glm4v": replace(_GLM, settings={"processor_class": "Glm4vProcessor"}),
    "glm4v_moe": replace(_GLM, settings={"processor_class": "Glm4vProcessor"}),
    "glm46v": replace(
        _GLM,
        processor={**_GLM.processor, "image_processor_type": "Glm46VImageProcessor"},
        settings={"processor_class": "Glm46VProcessor"},
    ),
    "internvl": Kind(
        {
            "image_token": "<IMG_CONTEXT>", "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
            "end_image_token": "</img>", "video_token": "<video>",
        },
        "<IMG_CONTEXT>\n",
        _TILES,
        {"processor_class": "InternVLProcessor", "image_seq_length": 1},
    ),
    "lfm2_vl": Kind(
        {
            "image_token": "<image>", "start": "<|image_start|>", "end": "<|image_end|>", "thumbnail": "<|img_thumbnail|>",
            **{f"tile_{row}_{column}": f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)},
        },
        "<image>",
        {
            "image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 14, "tile_size": 56, "max_tiles": 4,
            "min_image_tokens": 1, "max_image_tokens": 4, "crop_size": None, "do_pad": True, "resample": 2,
        },
    ),
    "aya_vision": Kind(
        {
            "image_token": "<|IMG_PATCH|>", "start": "<|START_OF_IMG|>", "end": "<|END_OF_IMG|>",
            "tile": "TILE", "whole": "TILE_GLOBAL", **{f"tile_{i}": f"TILE_{i}" for i in range(1, 5)},
        },
        "<image>",
        _TILES,
        {"processor_class": "AyaVisionProcessor", "img_size": 28, "patch_size": 14, "downsample_factor": 2},
        mark="<image>",
    ),
}  # fmt: skip


def write_image_model(folder: Path, name: str = "llava") -> Path:
    """Write a random checkpoint of a model type in NF4 into a folder."""
    skip_unless_known(name)
    kind = KINDS[name]
    tokenizer = _tokenizer(list(kind.tokens.values()))
    tokenizer.chat_template = PARTS.replace("IMAGE", kind.shown.replace("\n", "\\n"))
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in kind.tokens.items()}
    settings = json.loads(json.dumps(settings_of(name))) | kind.config
    settings["text_config"] |= {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "eos_token_id": 2}
    if "vocab_size_per_layer_input" in settings["text_config"]:
        settings["text_config"]["vocab_size_per_layer_input"] = len(tokenizer)
    if name.startswith(("qwen", "glm", "muse")):
        settings |= {f"{key}_id": found for key, found in ids.items()}
    else:
        settings["image_token_id" if "image_token_id" in settings else "image_token_index"] = ids["image_token"]
    save_nf4(random_model(config_of(name, **settings)), folder)
    tokenizer.save_pretrained(folder)
    add = {"extra_special_tokens": kind.tokens} if {"boi_token", "start_image_token"} & set(kind.tokens) else {}
    change_json(folder, lambda found: found.update(add), "tokenizer_config.json")
    (folder / "preprocessor_config.json").write_text(json.dumps(kind.processor))
    if kind.settings:
        (folder / "processor_config.json").write_text(json.dumps(kind.settings))
    return folder


def _tokenizer(special: list[str]) -> PreTrainedTokenizerFast:
    """One whose tokens are bytes."""
    names = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*names, *sorted(ByteLevel.alphabet())])}
    backend = TokenizerBackend(BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *special]})
    return tokenizer


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A random image of large patches, which survive scaling."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


def encoded(image: Image.Image, form: str = "PNG") -> bytes:
    """An image in a file's bytes."""
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    """A data: URL."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes, **fields: Any) -> dict[str, Any]:
    """A part of a message's content."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **fields}}
