"""An engine with workers, each a process of its own: everything that one rank does, with the same results."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from server.checkpoint.base import CheckpointError
from server.checkpoint.loading import load_model
from server.checkpoint.sharding.sharded import load_shard
from server.checkpoint.sharding.shards import Shard
from server.config import EngineConfig, LoraModule
from server.engine.core import Engine
from server.engine.grammar import Grammars
from server.engine.parallel import workers as workers_module
from server.engine.parallel.processes import processes_of, start_processes
from server.engine.parallel.start import load_ranks
from server.engine.parallel.workers import start_workers
from server.engine.runtime import exchange
from server.engine.runtime.limits import EngineConfigError
from server.engine.runtime.model.projections import replace_projections, weight_bytes
from server.types import GenerateRequest, LoadAdapter, RequestOutput
from tests.adapters import ALL_PROJECTIONS, save_adapter
from tests.checkpoint.layouts import CPU, silent
from tests.engine.factories import make_request, run_together
from tests.engine.model.test_hidden_states import embedding_of, state
from tests.engine.models import tiny_model
from tests.parallel.test_families import SIZES

RANKS = 2
Both = tuple[dict[str, list[RequestOutput]], dict[str, list[RequestOutput]]]
"""The outputs of one rank and of several, by request."""
JSON_GRAMMAR = '{"grammars":[{"json_schema":{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}}]}'


def failed(reason: str, fatal: bool) -> None:
    raise AssertionError(reason)


@pytest.fixture(scope="module")
def folder(embedded_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with the embedded model's tokenizer."""
    target = tmp_path_factory.mktemp("model")
    _model().save_pretrained(target)
    for path in embedded_folder.glob("*token*"):
        shutil.copy(path, target)
    return target


def _model() -> PreTrainedModel:
    # The MLP has 9 scale blocks, so that the second rank's part of it, and of its adapters, has a block of zeros.
    sizes = {**SIZES, "num_key_value_heads": 8, "num_hidden_layers": 4, "intermediate_size": 576}
    return tiny_model("llama", **sizes, vocab_size=49152)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two adapters of all projections."""
    root = tmp_path_factory.mktemp("adapters")
    for index, rank in enumerate((4, 8)):
        save_adapter(_model(), root / str(index), seed=index, size=0.2, r=rank, target_modules=ALL_PROJECTIONS)
    return [root / "0", root / "1"]


def _config(adapters: list[Path], ranks: int) -> EngineConfig:
    # So few KV blocks that sequences are preempted. A block has 16 tokens, keys and values, of four layers and eight heads.
    blocks = 16
    return EngineConfig(
        device="cpu", tensor_parallel_size=ranks, threads=ranks, enforce_eager=True, block_size=16, max_model_len=240,
        kv_cache_bytes=blocks * 16 * 4 * 2 * 8 * 32 * 4 // ranks, max_num_seqs=4, max_num_batched_tokens=64,
        lora_modules=(LoraModule(name="first", path=adapters[0]),), max_loras=2, max_lora_rank=8, allow_runtime_lora=True,
    )  # fmt: skip


def _requests() -> list[GenerateRequest]:
    shared = list(range(300, 340))
    return [
        make_request([*shared, 5, 6], "greedy", max_tokens=40, ignore_eos=True),
        make_request([*shared, 9], "prefix", max_tokens=40, ignore_eos=True),
        # It samples among few tokens: all of this model's are nearly alike, so that other sums of floats would sample a
        # neighbour.
        make_request(70, "sampled", max_tokens=30, temperature=0.9, top_k=8, top_p=0.9, seed=11, ignore_eos=True),
        make_request(30, "penalized", max_tokens=20, repetition_penalty=1.3, logit_bias={17: 4.0}, ignore_eos=True),
        make_request(25, "scored", max_tokens=8, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        make_request(12, "grammar", max_tokens=24, grammar=JSON_GRAMMAR),
        make_request(33, "wrong grammar", max_tokens=4, grammar='{"grammars":[{"lark_grammar":"start: missing"}]}'),
    ]


def _adapted(name: str) -> GenerateRequest:
    request = make_request(20, f"with {name}", max_tokens=12, ignore_eos=True)
    return GenerateRequest(request.request_id, request.prompt_token_ids, request.sampling, name)


def _run(folder: Path, adapters: list[Path], ranks: int) -> tuple[dict[str, list[RequestOutput]], Engine]:
    config = _config(adapters, ranks)
    runner, workers = load_ranks(folder, config, silent, failed, [])
    try:
        engine = Engine(
            runner, config, Grammars(folder, runner.limits.vocab_size), workers.device_memory if workers else None
        )
        found = run_together(engine, *_requests())
        # Its first steps sample no token of any sequence.
        found |= run_together(engine, make_request(150, "in three steps", max_tokens=5, ignore_eos=True))
        # Embeddings of a prompt in one step and of one in three, beside a sequence that generates.
        embedded = [embedding_of(list(range(5, 5 + length)), f"embedded {length}") for length in (12, 150)]
        found |= run_together(engine, *embedded, make_request(20, "beside embeddings", ignore_eos=True))
        assert runner.adapters is not None
        runner.adapters.read(LoadAdapter("second", str(adapters[1])))
        while not (results := engine.settle_adapters()):
            pass
        assert [result.error for result in results] == [None]
        found |= run_together(engine, _adapted("first"), _adapted("second"), make_request(20, "plain", ignore_eos=True))
    finally:
        if workers is not None:
            workers.end()
            exchange.leave()
    return found, engine


@pytest.fixture(scope="module")
def both(folder: Path, adapters: list[Path]) -> Both:
    """The outputs of one rank, and of several."""
    one, engine = _run(folder, adapters, 1)
    assert engine.stats().preemptions > 0
    several, engine = _run(folder, adapters, RANKS)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_cache_hits > 0
    assert len(engine.stats().other_device_memory) == RANKS - 1
    return one, several


def test_all_requests_get_the_tokens_and_errors_of_one_rank(
    both: Both,
) -> None:
    one, several = both
    for name, outputs in one.items():
        tokens = [output.new_token_ids for output in outputs]
        assert [output.new_token_ids for output in several[name]] == tokens, name
        assert several[name][-1].finish_reason == outputs[-1].finish_reason, name
    assert several["wrong grammar"][-1].finish_reason == "error"
    assert several["wrong grammar"][-1].error == one["wrong grammar"][-1].error
    plain = [output.new_token_ids for output in several["plain"]]
    for name in ("with first", "with second"):
        assert [output.new_token_ids for output in several[name]][: len(plain)] != plain


def test_log_probabilities_are_those_of_one_rank(
    both: Both,
) -> None:
    def scores(outputs: list[RequestOutput]) -> list[float]:
        entries = [entry for o in outputs for entry in (*(o.prompt_logprobs or []), *(o.logprobs or []))]
        return [entry.logprob for entry in entries]

    one, several = (scores(found["scored"]) for found in both)
    assert len(one) == 24 + 8
    assert several == pytest.approx(one, abs=1e-3)


def test_embeddings_are_those_of_one_rank(both: Both) -> None:
    one, several = both
    for name in ("embedded 12", "embedded 150"):
        expected, found = (state(outputs[name][-1]) for outputs in (one, several))
        assert expected.std() > 0.1
        torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)
    assert not torch.allclose(state(one["embedded 12"][-1]), state(one["embedded 150"][-1]), atol=0.1)


def test_a_rank_has_its_share_of_the_weights(embedded_folder: Path) -> None:
    ranks = 3
    whole = load_model(embedded_folder, CPU, torch.float32, silent)
    replace_projections(whole)
    for rank in range(ranks):
        shard = load_shard(embedded_folder, CPU, torch.float32, silent, Shard(rank, ranks)).model
        replace_projections(shard)
        assert weight_bytes(shard) < weight_bytes(whole) / ranks * 1.03


def test_what_cannot_be_is_refused_before_anything_is_loaded(embedded_folder: Path) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=2)
    with pytest.raises(CheckpointError, match="possible: 1, 3"):
        load_ranks(embedded_folder, config, silent, failed, [])
    with pytest.raises(EngineConfigError, match=r"batch_invariant does not work with engine\.tensor_parallel_size 2"):
        load_ranks(embedded_folder, config.model_copy(update={"batch_invariant": True}), silent, failed, [])


def test_processes_that_were_started_early_end_with_a_refusal(embedded_folder: Path) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=2)
    processes = processes_of(config, [])
    assert [process.poll() for process in processes] == [None]
    with pytest.raises(CheckpointError, match="possible: 1, 3"):
        load_ranks(embedded_folder, config, silent, failed, [], processes)
    assert [process.poll() for process in processes] == [-signal.SIGKILL]


@pytest.mark.rest
def test_a_process_that_is_told_nothing_ends() -> None:
    (process,) = start_processes(2, False, [])
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 1


def test_a_rank_that_dies_while_it_imports_is_named(embedded_folder: Path) -> None:
    config = EngineConfig(device="cpu", tensor_parallel_size=3)
    processes = processes_of(config, [])
    processes[1].kill()
    processes[1].wait()
    with pytest.raises(ChildProcessError, match="rank 2 ended: killed by signal 9"):
        load_ranks(embedded_folder, config, silent, failed, [], processes)
    assert all(process.poll() is not None for process in processes)


def test_ranks_end_where_there_is_no_room_for_their_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: str) -> str:
        raise OSError("no space left on device")

    monkeypatch.setattr(workers_module.tempfile, "mkdtemp", refuse)
    processes = start_processes(2, False, [])
    with pytest.raises(OSError, match="no space left"):
        start_workers(Path("."), EngineConfig(), processes, "cpu", failed)
    assert processes[0].poll() is not None


def test_only_a_known_number_of_ranks_is_started_early() -> None:
    assert processes_of(EngineConfig(tensor_parallel_size="auto"), []) == []
    assert processes_of(EngineConfig(), []) == []
