"""Speculation on several ranks: draft tokens are proposed by rank 0 and verified by all; no answer changes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.parallel.start import load_ranks
from server.engine.runtime import exchange
from server.types import EngineStats, RequestOutput
from tests.adapters import ALL_PROJECTIONS, save_adapter
from tests.engine.factories import fix_costs
from tests.engine.speculation.engines import (
    CHEAP,
    VOCABULARY,
    close,
    draft_model,
    joined,
    repeating_model,
    run_wave,
    some_requests,
)
from tests.parallel.test_families import SIZES
from tests.parallel.test_workers import failed, silent

RANKS = 2
WIDE = {**SIZES, "num_key_value_heads": 8, "head_dim": 64, "num_hidden_layers": 4}
# So few KV blocks of 4 tokens that sequences are preempted; bytes of the keys and values of 4 layers and 8 heads.
BLOCKS, BYTES_PER_BLOCK = 41, 4 * 2 * 4 * 8 * 64 * 4


@pytest.fixture(scope="module")
def folder(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and in draft/ one that mostly agrees with it."""
    target = tmp_path_factory.mktemp("model")
    model = repeating_model(**WIDE)
    for path, made in ((target, model), (target / "draft", draft_model(model))):
        made.save_pretrained(path)
        for file in embedded_folder.glob("*token*"):
            shutil.copy(file, path)
    return target


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> LoraModule:
    path = tmp_path_factory.mktemp("adapters") / "a"
    save_adapter(repeating_model(**WIDE), path, 0, 0.3, r=4, target_modules=ALL_PROJECTIONS)
    return LoraModule(name="a", path=path)


def answers(
    folder: Path, adapter: LoraModule, ranks: int, speculation: str
) -> tuple[dict[str, RequestOutput], EngineStats]:
    """Answers to random requests: greedy and sampled ones, with all options, adapters, preemptions and shared prefixes."""
    drafts = speculation == "draft"
    of_a_block = BYTES_PER_BLOCK // ranks + drafts * BYTES_PER_BLOCK  # every rank has the draft model whole
    config = EngineConfig(
        device="cpu", tensor_parallel_size=ranks, threads=ranks, enforce_eager=True, block_size=4, max_model_len=160,
        max_num_seqs=6, max_num_batched_tokens=40, kv_cache_bytes=BLOCKS * of_a_block, lora_modules=(adapter,),
        speculation=speculation, draft_model=str(folder / "draft") if drafts else None,
    )  # fmt: skip
    runner, workers = load_ranks(folder, config, silent, failed, [])
    try:
        engine = Engine(runner, config, Grammars(folder, VOCABULARY, 2))
        if engine._speculator is not None:
            fix_costs(engine, CHEAP)
        outputs, _ = run_wave(engine, some_requests(random.Random(3), 0, []), None)
        return {name: joined(own) for name, own in outputs.items()}, engine.stats()
    finally:
        if workers is not None:
            workers.end()
            exchange.leave()


@pytest.fixture(scope="module")
def expected(folder: Path, adapter: LoraModule) -> dict[str, RequestOutput]:
    return answers(folder, adapter, RANKS, "off")[0]


@pytest.mark.parametrize(
    "speculation",
    [pytest.param("lookup", marks=pytest.mark.rest), pytest.param("draft", marks=pytest.mark.slow)],
)
def test_answers_are_those_without_speculation(
    speculation: str, folder: Path, adapter: LoraModule, expected: dict[str, RequestOutput]
) -> None:
    found, stats = answers(folder, adapter, RANKS, speculation)
    for name, wanted in expected.items():
        assert wanted.finish_reason in ("stop", "length"), wanted.error
        assert found[name].new_token_ids == wanted.new_token_ids, name
        assert found[name].finish_reason == wanted.finish_reason, name
        assert close(found[name].logprobs, wanted.logprobs), name
        assert close(found[name].prompt_logprobs, wanted.prompt_logprobs), name
    # Many draft tokens came true, and some did not.
    assert stats.draft_tokens > sum(stats.accepted_by_place) > len(expected)
    assert stats.preemptions > 0
    assert stats.prefix_cache_hits > 0
