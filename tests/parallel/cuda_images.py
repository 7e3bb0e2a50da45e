"""Prompts with images on two GPUs: `python -m tests.parallel.cuda_images FAMILY FOLDER` fails where answers are wrong."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch

from tests.engine.model.test_images_cuda import check_images


def main() -> None:
    name, folder = sys.argv[1:]
    status = 1
    try:
        check_images(name, 64, Path(folder), torch.device("cuda", 0), torch.bfloat16, ranks=2)
        status = 0
    except Exception:
        traceback.print_exc()
    # NCCL's end would wait for ranks that have gone; those end with this process.
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
