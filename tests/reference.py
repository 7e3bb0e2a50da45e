"""transformers' own generate on the embedded checkpoint, as bitsandbytes computes it exactly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.prompts import Chat


@dataclass(frozen=True)
class Greedy:
    """One greedy answer: its token ids and, per token, how far the best logit was ahead of the second."""

    token_ids: list[int]
    margins: list[float]


def expand_linears(model: PreTrainedModel) -> None:
    """Put plain layers of the same float32 weights in the place of bitsandbytes' layers.

    bitsandbytes' exact CPU path expands a weight and calls torch's linear for every token; here it is expanded once. (Its
    other path rounds weights, scales and activations to bfloat16 where the CPU has that.)
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            module.weight.quant_state.dtype = torch.float32
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            plain.weight = torch.nn.Parameter(weight, requires_grad=False)
            model.set_submodule(name, plain)


class Reference:
    """The oracle of the whole server: one request at a time, none of our code in it."""

    def __init__(self, folder: Path) -> None:
        self._answers: dict[tuple[str, int], Greedy] = {}
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for parameter in self.model.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()
        expand_linears(self.model)

    def known_greedy(self, chat: Chat, max_tokens: int) -> Greedy:
        """greedy(), computed once; for a model that stays as it is."""
        key = (json.dumps(chat), max_tokens)
        if key not in self._answers:
            self._answers[key] = self.greedy(chat, max_tokens)
        return self._answers[key]

    def greedy(self, chat: Chat, max_tokens: int) -> Greedy:
        """Answer of model.generate to this chat alone, without sampling."""
        inputs = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.inference_mode():
            out = self.model.generate(
                **inputs, max_new_tokens=max_tokens, do_sample=False, output_logits=True, return_dict_in_generate=True
            )
        best = [logits[0].topk(2).values for logits in out.logits]
        new = out.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return Greedy(new, [float(top[0] - top[1]) for top in best])
