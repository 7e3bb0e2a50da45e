"""Writes the tables of families in docs/models.md: python -m tests.checkpoint.models_page."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from server.checkpoint.images import IMAGE_TYPES
from tests.checkpoint import further_families as further
from tests.checkpoint.families import NEWER, REFUSED, SERVED
from tests.checkpoint.multimodal import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_INTERFACE = "transformers' code of it does not go through its attention interface"
_REASONS = {
    "bloom": _INTERFACE,
    "mpt": _INTERFACE,
    "xglm": _INTERFACE,
    "diffllama": "two attentions in a layer",
    "doge": "masks that depend on values",
}
_TEXT_ONLY = {
    "gemma3n": "text only, without timm, which its towers need",
    "llama4": "text only, contexts of one attention chunk",
    "mllama": "text only, without the layers that attend to images",
}
_ROW = re.compile(r"^\| `(?P<family>[^`]+)` \| [^|]+ \| (?P<name>\w+) \|", re.MULTILINE)


def tables() -> dict[str, dict[str, str]]:
    """Read what the page says of each model type, by the title of the section."""
    served = {family: "works with transformers 5.24 or newer" if family in NEWER else "works" for family in SERVED}
    refused = {family: f"refused: {_REASONS[family]}" for family in REFUSED}
    multimodal = {
        family: "works" if family in IMAGE_TYPES else _TEXT_ONLY.get(family, "text only")
        for family in (*CLASSES, "gemma3n")
    }
    others = {family: _answer(family, settings) for family, settings in further.SERVED.items()}
    others |= dict.fromkeys(further.WRONG_POSITIONS, "refused: counts positions across the sequences of a step")
    others |= dict.fromkeys(further.NEEDS_IMAGES, "refused: needs an image in every prompt")
    others |= {family: f"{_answer(family, {})}, from 16 bit alone" for family in further.FROM_16_BIT}
    return {
        "Text": {**dict(sorted(served.items())), **dict(sorted(refused.items()))},
        "Multimodal classes": dict(sorted(multimodal.items())),
        "Further families": dict(sorted(others.items())),
    }


def _answer(family: str, settings: Mapping[str, object]) -> str:
    if settings.get("is_decoder"):
        return "works with is_decoder"
    if family in IMAGE_TYPES:
        return "works"
    return "text only" if family in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else "works"


def written(page: str) -> str:
    """The page with its tables as they have to be. A class that transformers lacks is kept from the page."""
    known = {match["family"]: match["name"] for match in _ROW.finditer(page)}
    for title, rows in tables().items():
        layers = title == "Further families"
        lines = ["| model_type | | class |", "| --- | --- | --- |"]
        if layers:
            lines = ["| model_type | | class | layers |", "| --- | --- | --- | --- |"]
        for family, answer in rows.items():
            own = ""
            if layers:
                kind = "written" if family in further.WRITTEN else "transformers'"
                own = f" {kind if family in further.SERVED else ''} |"
            lines.append(f"| `{family}` | {answer} | {_class_of(family, known)} |{own}")
        section = re.compile(rf"(\n## {title}\n.*?\n)\| model_type \|.*?\n(?!\|)", re.DOTALL)
        assert section.search(page), f"docs/models.md has no table under {title}"
        page = section.sub(lambda match, lines=lines: match[1] + "\n".join(lines) + "\n", page, count=1)  # type: ignore[misc]
    return page


def _class_of(family: str, known: Mapping[str, str]) -> str:
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    order = names if family in SERVED or family in REFUSED else names[::-1]
    found = next((mapping[family] for mapping in order if family in mapping), known.get(family, "?"))
    return found if isinstance(found, str) else found[0]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
