"""Generate with an NF4 checkpoint in transformers, on bitsandbytes' kernels and then on nf4_kernels.

    python examples/transformers_nf4.py CHECKPOINT [--prompt TEXT] [--tokens 64] [--adapter PEFT_FOLDER]

CHECKPOINT is a transformers + bitsandbytes NF4 folder; `python -m server.checkpoint` makes a small one and prints where.
The model is not changed: enable() routes every Linear4bit layer of the process to the kernels, disable() takes it back.
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import nf4_kernels


def main() -> None:
    parser = argparse.ArgumentParser(description="transformers with and without nf4_kernels")
    parser.add_argument("checkpoint")
    parser.add_argument("--prompt", default="The three largest rivers of Europe are")
    parser.add_argument("--tokens", type=int, default=64, help="to generate")
    parser.add_argument("--adapter", help="folder of a PEFT adapter; it stays unmerged")
    options = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(options.checkpoint)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, device_map=device)
    if options.adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, options.adapter)
    inputs = tokenizer(options.prompt, return_tensors="pt").to(device)

    def generate(name: str) -> str:
        lengths = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
        with torch.inference_mode():
            model.generate(**inputs, max_new_tokens=2, do_sample=False)  # kernels load at the first call
            began = time.perf_counter()
            ids = model.generate(**inputs, **lengths, do_sample=False)
            text: str = tokenizer.decode(ids[0], skip_special_tokens=True)  # waits for the GPU
        print(f"{name}: {options.tokens / (time.perf_counter() - began):.1f} tokens per second\n  {text!r}")
        return text

    print(f"kernels: {nf4_kernels.capabilities()[device]}")
    # The kernels first: on some CPUs bitsandbytes repacks the weights at its first call, and they are then its own.
    nf4_kernels.enable()
    ours = generate("nf4_kernels ")
    nf4_kernels.disable()
    theirs = generate("bitsandbytes")
    print("the same text" if ours == theirs else "the texts differ: rounding decided a near tie between two tokens")


if __name__ == "__main__":
    main()
