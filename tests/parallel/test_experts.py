"""Mixtures of experts divided among ranks: one rank's greedy tokens, of every family and of every layout of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nf4_kernels import cpu
from tests.engine.layers.test_written_layers import WRITTEN_MIXTURES
from tests.moe_checkpoints import (
    FAMILIES,
    is_projection,
    nowhere,
    save_moe,
    separate_experts,
    tiny_moe,
    unsloth_gpt_oss,
)
from tests.nf4_kernels.weights import FIXED_POINT
from tests.parallel.rank import EAGER, Answers, answers, answers_of_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 512, "moe_intermediate_size": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4,
}  # fmt: skip
# Heads of latent attention have sizes of their own, and each has keys and values.
_LATENT = {"num_key_value_heads": 8}
OTHERS: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 512},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "llama4_text": {"intermediate_size_mlp": 512},
}
MOST_ZEROS = 1 / 9
GREEDY = ("3", "41", "17")
Save = Callable[[Path], object]


def saved(family: str, sizes: dict[str, Any] | None = None, **options: Any) -> Save:
    """Save a small random model of a family: an NF4 tensor for each expert, scales nested, or as options say."""
    sizes = {**SIZES, **OTHERS.get(family, {}), **(sizes or {})}
    renames = {"gpt_oss": unsloth_gpt_oss, "llama4_text": separate_experts}
    if family in renames:
        options = {"rename": renames[family], **options}
    return lambda folder: save_moe(folder, tiny_moe(family, **sizes), **options)


def also_routers(name: str) -> bool:
    return is_projection(name) or ".gate.weight" in name


FAMILY_CASES = {family: saved(family) for family in FAMILIES}
LAYOUT_CASES = {
    "stacked": saved("qwen3_moe", stacked=True),
    "plain scales": saved("qwen3_moe", nested=False),
    "16 bit": saved("mixtral", in_nf4=nowhere),
    "16 bit, gates and ups in turns": saved("gpt_oss", in_nf4=nowhere, rename=lambda name, tensor: {name: tensor}),
    "routers in NF4": saved("glm4_moe", in_nf4=also_routers),
}
# 9 scale blocks, so that the second rank has one of zeros: of experts, shared experts and the dense layer.
PADDED = {"moe_intermediate_size": 576, "intermediate_size": 576}
PADDED_CASES = {
    "padded": saved("glm4_moe", PADDED),
    "padded, gates and ups in turns": saved("gpt_oss", PADDED),
    "padded and stacked": saved("granitemoe", PADDED),
}
FOUR = {
    "qwen3_moe": saved("qwen3_moe"),
    "glm4_moe": saved("glm4_moe"),
    "deepseek_v3": saved("deepseek_v3"),
    "llama4_text": saved("llama4_text"),
    # Two ranks have the same KV head, of OLMoE with its norm. 15 scale blocks, of which the last rank has three and a zero.
    "olmoe": saved("olmoe", {"num_key_value_heads": 2, "num_attention_heads": 4, "hidden_size": 256}),
    "gpt_oss": saved("gpt_oss", {"num_key_value_heads": 2, "intermediate_size": 960}),
}


def check(cases: dict[str, Save], count: int, root: Path) -> None:
    """Every rank gets one rank's tokens and log-probabilities, and holds its part of the weights and 3 % of all at most."""
    for case, save in cases.items():
        (root / case).mkdir()
        save(root / case)
    whole = {case: answers(root / case, None, EAGER) for case in cases}
    ranks = answers_of_ranks([root / case for case in cases], count, root / "store")
    for case, expected in whole.items():
        most = 1 / count + 0.03 + (MOST_ZEROS / count if case in PADDED_CASES else 0)
        for found in ranks:
            compare(found[str(root / case)], expected, most, case)
            if case in FAMILIES:
                assert found[str(root / case)]["written"] == (case in WRITTEN_MIXTURES), case
            # Sampled ones, too, are the same on every rank.
            assert found[str(root / case)]["tokens"] == ranks[0][str(root / case)]["tokens"], case


def compare(found: Answers, expected: Answers, most: float, case: str) -> None:
    """The same greedy tokens, but for near ties, and log-probabilities; `most` of the weights' bytes."""
    # Kernels in fixed point round (docs/adr/0027).
    off = 4e-3 if cpu.isa() in FIXED_POINT else 1e-3
    compared = 0
    for name in GREEDY:
        # From a near tie on, both may go on in different ways.
        stop = next((i for i, gap in enumerate(expected["gaps"][name]) if gap < 2 * off), len(expected["gaps"][name]))
        assert found["tokens"][name][:stop] == expected["tokens"][name][:stop], case
        scores = expected["logprobs"][name][:stop]
        assert found["logprobs"][name][:stop] == pytest.approx(scores, abs=off), case
        compared += stop
    assert compared >= 12, case
    assert found["weights"] <= most * expected["weights"], case


@pytest.mark.rest
def test_every_family_and_layout_gives_the_tokens_of_one_rank(tmp_path: Path) -> None:
    check({**FAMILY_CASES, **LAYOUT_CASES, **PADDED_CASES}, 2, tmp_path)


@pytest.mark.slow
def test_four_ranks_give_the_tokens_of_one(tmp_path: Path) -> None:
    check(FOUR, 4, tmp_path)
