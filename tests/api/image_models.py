"""Small random models that take images, with the embedded model's tokenizer and the files that say how images are prepared."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import AutoTokenizer

from tests.checkpoint.layouts import config_of, random_model, save_nf4
from tests.checkpoint.multimodal import CLASSES

PARTS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CLIP = {
    "do_resize": True, "size": {"shortest_edge": 28}, "do_center_crop": True, "crop_size": {"height": 28, "width": 28},
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "llava": {
        "tokens": ["<image>"],
        "shown": "<image>\\n",
        "image": "<image>",
        "processor": {"image_processor_type": "CLIPImageProcessor", **_CLIP},
        "settings": {
            "processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1, "image_token": "<image>",
        },
    },
}  # fmt: skip


def write_image_model(folder: Path, source: Path, kind: str = "llava", *, template: str = PARTS) -> Path:
    """Write a checkpoint in NF4 into a folder; source has the tokenizer."""
    files = KINDS[kind]
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokenizer.add_special_tokens({"additional_special_tokens": files["tokens"]})
    tokenizer.chat_template = template.replace("IMAGE", f"{{{{ '{files['shown']}' }}}}")
    settings = json.loads(json.dumps(CLASSES[kind]))
    token_id = tokenizer.convert_tokens_to_ids(files["image"])
    settings["text_config"] |= {"vocab_size": len(tokenizer), "max_position_embeddings": 2048, "eos_token_id": 2}
    settings["image_token_index" if kind in ("llava", "gemma3", "mistral3") else "image_token_id"] = token_id
    save_nf4(random_model(config_of(kind, **settings)), folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(files["processor"]))
    (folder / "processor_config.json").write_text(json.dumps(files["settings"]))
    return folder


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
