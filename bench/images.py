"""Time that an image adds to a prompt in our engine, next to transformers' tower alone. Random weights of a model's shape.

python -m bench.images                                   # Qwen2.5-VL-7B's shape on a GPU, 8 of its text layers, eager
python -m bench.images --text-layers 28 --compiled       # all of it, as it is served
python -m bench.images --shape tiny --side 224           # in seconds on a CPU

A round computes a prompt with a new image, the same prompt again, whose image's features are kept then, and a prompt of as
many text tokens, each to its first token and without prefix caching; what an image adds is the difference to the text. Text
layers cost both the same, so fewer of them change the difference little. In the same round transformers' tower runs alone
on the same pixels: a copy of the model's, made before anything of ours has touched it. Beside these, what the image process
does before: decoding, transformers' processor, writing the tensors. The rows go to bench/results/images-<device>.json.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from bench.image_preparation import Preparation, Prepared
from bench.image_shapes import SHAPES
from bench.machine import cores, cpu_name, gpu_in_file_names, versions
from server.checkpoint.dummy import fill_randomly
from server.checkpoint.names import is_of_tower
from server.config import EngineConfig
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.supervisor.child import ENVIRONMENT
from server.types import GenerateRequest, ImageInput, SamplingParams

RESULTS = Path(__file__).parent / "results"
TEXT = 16
"""Tokens in front of an image, and behind it."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Row:
    """Medians over the rounds of one run; seconds."""

    model: str
    tower: str
    """NF4, or the dtype of its weights."""
    side: int
    """The image is a square with this many pixels a side."""
    tokens: int
    """Tokens that the image takes in the prompt."""
    text_layers: int
    compiled: bool
    tower_s: float
    """transformers' tower alone."""
    image_s: float
    """A prompt with an image that is new to the engine."""
    kept_s: float
    """The same prompt when the image's features are kept."""
    text_s: float
    """A prompt of as many text tokens."""
    added_s: float
    """The median of what the rounds' new images added to text."""
    ratio: float
    """The median of the rounds' added_s / tower_s."""
    decode_s: float
    processor_s: float
    """transformers' image processor, without torch."""
    write_s: float


def random_model(
    shape: str, text_layers: int | None, device: torch.device, dtype: torch.dtype, nf4_tower: bool
) -> PreTrainedModel:
    """A model of a shape; its text in NF4."""
    config = SHAPES[shape].config(text_layers)
    config.dtype = dtype
    torch.manual_seed(0)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
    fill_randomly(model, device, dtype, lambda *_: None, lambda name: nf4_tower or not is_of_tower(name))
    model.tie_weights()
    return model.eval().requires_grad_(False)


def copy_of_tower(model: PreTrainedModel) -> Any:
    """A copy of a model without its language model, for transformers' own get_image_features()."""
    base: Any = model.base_model
    text, base.language_model = base.language_model, None
    head, model.lm_head = model.lm_head, None
    try:
        return copy.deepcopy(model)
    finally:
        base.language_model, model.lm_head = text, head


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Wall time of work, with the device's part of it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


class Bench:
    """One model in our engine, and a copy of its tower."""

    def __init__(self, model: PreTrainedModel, compiled: bool, marks: tuple[str, str]) -> None:
        self.device, self._config = model.device, model.config
        self._marks = [int(getattr(model.config, name)) for name in marks]
        self._tower = copy_of_tower(model)
        self._dtype = model.dtype
        config = EngineConfig(
            device=self.device.type,
            max_num_seqs=2,
            max_num_batched_tokens=4096,
            max_model_len=4096,
            kv_cache_bytes=2**30 if self.device.type == "cuda" else 2**26,
            enable_prefix_caching=False,
            enforce_eager=not compiled,
            expanded_weights="off",
        )
        self.engine = Engine(build_runner(model, config), config)

    def tower(self, image: Prepared) -> float:
        """Seconds of transformers' tower on an image's tensors, which are in host memory as they are for our engine."""

        def run() -> None:
            given = {name: tensor.to(self.device) for name, tensor in image.tensors.items()}
            given["pixel_values"] = given["pixel_values"].to(self._dtype)
            with torch.inference_mode():
                self._tower.get_image_features(**given)

        return seconds_of(run, self.device)

    def prompt(self, tokens: list[int], images: list[ImageInput]) -> float:
        """Seconds from a request to its only token."""
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self.engine.add(GenerateRequest(str(next(_numbers)), tokens, params, images=images))

        def run() -> None:
            while self.engine.has_work:
                for output in self.engine.step().outputs:
                    if output.error is not None:
                        raise RuntimeError(output.error)

        return seconds_of(run, self.device)

    def round(self, image: Prepared, seed: int) -> dict[str, float]:
        """Seconds of everything that is compared, in an order that changes from round to round."""
        text = [5 + (seed * 31 + i * 7) % 300 for i in range(TEXT)]
        start, end = TEXT + 1, TEXT + 1 + image.tokens
        before, after = self._marks
        marked = [before, *[self._config.image_token_id] * image.tokens, after]
        shown = [ImageInput(seed.to_bytes(16, "little"), start, end, image.file)]
        plain = [5 + (seed * 17 + i * 13) % 400 for i in range(len(marked))]
        work: list[tuple[str, Callable[[], float]]] = [
            ("image_s", lambda: self.prompt(text + marked + text, shown)),
            ("tower_s", lambda: self.tower(image)),
            ("text_s", lambda: self.prompt(text + plain + text, [])),
        ]
        found = {name: run() for name, run in (work if seed % 2 else work[::-1])}
        return found | {"kept_s": self.prompt(text + marked + text, shown)}


def measure(asked: argparse.Namespace, device: torch.device, nf4_tower: bool) -> Row:
    """Make a model, run all rounds, print and give the row."""
    begun = time.perf_counter()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = random_model(asked.shape, asked.text_layers, device, dtype, nf4_tower)
    layers = model.config.get_text_config().num_hidden_layers
    shape = SHAPES[asked.shape]
    bench = Bench(model, asked.compiled, shape.marks)
    ready = time.perf_counter() - begun
    with tempfile.TemporaryDirectory() as folder:
        preparation = Preparation(Path(folder), shape)
        rounds, tokens = [], 0
        for seed in range(1 + asked.rounds):
            image = preparation.prepare(asked.side, seed)
            tokens = image.tokens
            rounds.append(bench.round(image, seed))
    del rounds[0]  # it warms up
    medians = {name: statistics.median(own[name] for own in rounds) for name in rounds[0]}
    added = [own["image_s"] - own["text_s"] for own in rounds]
    ratios = [more / own["tower_s"] for more, own in zip(added, rounds, strict=True)]
    row = Row(
        asked.shape,
        "NF4" if nf4_tower else str(dtype).removeprefix("torch."),
        asked.side,
        tokens,
        layers,
        asked.compiled,
        added_s=statistics.median(added),
        ratio=round(statistics.median(ratios), 3),
        **medians,
        **{name: statistics.median(own[1:]) for name, own in preparation.seconds.items()},
    )
    shown = ", ".join(f"{name[:-2]} {1e3 * value:.1f}" for name, value in asdict(row).items() if name.endswith("_s"))
    print(f"{row.model}, tower in {row.tower}, {tokens} tokens, ready in {ready:.0f} s; in ms: {shown}", flush=True)
    print(f"an image adds {row.ratio:.3f} x its tower's time ({min(ratios):.3f} to {max(ratios):.3f})", flush=True)
    return row


def main() -> int:
    """Measure, print and write the rows."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.images", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-vl-7b", choices=list(SHAPES))
    parser.add_argument("--side", type=int, default=1024, help="pixels")
    parser.add_argument("--text-layers", type=int, default=None, help="default: 8, or all of a tiny model's")
    parser.add_argument("--compiled", action="store_true", help="with written layers and CUDA graphs")
    parser.add_argument("--towers", nargs="*", default=["16bit", "nf4"], choices=["16bit", "nf4"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="default: bench/results/images-<device>.json")
    asked = parser.parse_args()
    if asked.text_layers is None and asked.shape != "tiny":
        asked.text_layers = 8
    if ENVIRONMENT.keys() - os.environ:
        # As in bench.e2e: C libraries and torch read these variables when they are loaded.
        os.execve(sys.executable, [sys.executable, "-m", "bench.images", *sys.argv[1:]], {**ENVIRONMENT, **os.environ})
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = [measure(asked, device, tower == "nf4") for tower in asked.towers]
    name = torch.cuda.get_device_name() if device.type == "cuda" else cpu_name()
    file = gpu_in_file_names() if device.type == "cuda" else f"cpu-{cores()}-cores"
    path = asked.out or RESULTS / f"images-{file}.json"
    machine = {"device": name, "cores": cores(), **versions()}
    path.write_text(
        json.dumps({"machine": machine, "rounds": asked.rounds, "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
    )
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
