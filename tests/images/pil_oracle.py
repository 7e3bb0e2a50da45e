"""transformers' own image processors of Gemma 4 12B and Muse-Glimmer: python -m tests.images.pil_oracle FOLDERS.

Folders and files as lfm2_vl_oracle.py has them, whose functions stand for torchvision's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.images.lfm2_vl_oracle import _put_functions


def main() -> None:
    _put_functions()
    from transformers.models.gemma4_unified.image_processing_gemma4_unified import Gemma4UnifiedImageProcessor
    from transformers.models.muse_glimmer.image_processing_muse_glimmer import MuseGlimmerImageProcessor

    classes: tuple[Any, ...] = (Gemma4UnifiedImageProcessor, MuseGlimmerImageProcessor)
    known = {each.__name__: each for each in classes}
    for folder in map(Path, sys.argv[1:]):
        settings = json.loads((folder / "preprocessor_config.json").read_text())
        processor = known[settings.pop("image_processor_type")](**settings)
        for file in folder.glob("*.png"):
            np.savez(file.with_suffix(".npz"), **processor([Image.open(file)], return_tensors="np"))


if __name__ == "__main__":
    main()
