"""Models of every family, divided among 2 and 4 ranks: the tokens of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.layers.test_written_layers import WRITTEN
from tests.engine.models import tiny_model
from tests.parallel.rank import EAGER, Answers, answers, answers_of_ranks, check_same

pytestmark = pytest.mark.rest

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
# Phi's heads divide its hidden size, and each has a KV head.
OTHERS: dict[str, dict[str, Any]] = {
    "phi": {"hidden_size": 256, "num_key_value_heads": 8, "head_dim": 32},
    "gemma2": {"num_hidden_layers": 4},
    "gemma3_text": {"num_hidden_layers": 4},
    "granite": {"attention_bias": True, "mlp_bias": True},
    "llama": {"tie_word_embeddings": True},
}


FAMILIES = (
    "llama",
    "smollm3",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3_text",
    "phi",
    "phi3",
    "granite",
    # Norms over all heads.
    "olmo2",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By family, a checkpoint of a small random model in 16 bit, which is quantized while it is loaded."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        tiny_model(family, **{**SIZES, **OTHERS.get(family, {})}).save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, Answers]:
    """Answers of one rank by transformers' own layers."""
    return {family: answers(folder, None, EAGER) for family, folder in folders.items()}


# With four ranks, two have the same KV head. Phi-3 has q, k and v in one weight.
@pytest.mark.parametrize(
    ("count", "families"), [(2, FAMILIES), pytest.param(4, ("llama", "phi3", "qwen3"), marks=pytest.mark.slow)]
)
def test_every_family_gives_the_tokens_of_one_rank(
    count: int,
    families: tuple[str, ...],
    folders: dict[str, Path],
    expected: dict[str, Answers],
    tmp_path: Path,
) -> None:
    found = answers_of_ranks([folders[family] for family in families], count, tmp_path / "store")[0]
    for family in families:
        check_same(found[str(folders[family])], expected[family], family)
        assert found[str(folders[family])]["written"] == (family in WRITTEN), family


def test_what_one_rank_finds_wrong_no_rank_uses(
    folders: dict[str, Path], expected: dict[str, Answers], tmp_path: Path
) -> None:
    for found in answers_of_ranks([folders["qwen3"]], 2, tmp_path / "store", refusing=1):
        check_same(found[str(folders["qwen3"])], expected["qwen3"], "qwen3")
        assert not found[str(folders["qwen3"])]["written"]
