"""The shared store of recent answers: who sees which, how much memory it takes, and when it does its work."""

from __future__ import annotations

import copy
import itertools
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from server.config import ConfigError, EngineConfig, LoraModule
from server.config.sources import load_config
from server.engine.core import Engine
from server.engine.runtime.preparation.assembly import build_runner
from server.engine.scheduling.sequence import Owner, Sequence
from server.engine.scheduling.step import Step
from server.engine.speculation.costs import StepCosts
from server.engine.speculation.guesser import Guesser, SharedReader
from server.engine.speculation.shared_store import LEAST_BYTES, SharedStore
from server.engine.speculation.speculator import Speculator
from server.engine.speculation.suffixes import END, IndexReader, SuffixIndex
from server.types import GenerateRequest, SamplingParams
from tests.adapters import save_adapter
from tests.engine.factories import fix_costs, make_request, run_together, tokens
from tests.engine.models import tiny_model

CHEAP = StepCosts({size: 1 + size / 1000 for size in range(1, 17)})
MINE: Owner = (b"", 0)


def longest_known(text: list[int], indexed: list[int]) -> int:
    """The length of the longest suffix of text that is in indexed, found by trying."""
    for length in range(min(len(text), len(indexed)), 0, -1):
        if any(indexed[i : i + length] == text[-length:] for i in range(len(indexed) - length + 1)):
            return length
    return 0


@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("alphabet", [1, 2, 3, 12])
def test_a_reader_finds_the_longest_suffix_in_an_index(alphabet: int, grows: bool) -> None:
    chance = random.Random(alphabet)
    for _ in range(40):
        index, text = SuffixIndex(), list[int]()
        reader = IndexReader(index)
        for number in range(80):
            if chance.random() < 0.5 if grows else number < 40:
                index.append(END if chance.random() < 0.1 else chance.randrange(alphabet))
            else:
                text.append(chance.randrange(alphabet))
                reader.append(text[-1])
                match, indexed = reader.match, index.tokens
                longest = longest_known(text, indexed)
                assert match == longest or (grows and match < longest)
                assert bool(match) == bool(longest)
                found = reader.following(3)
                assert END not in found
                assert reader.next == (found[0] if found else END)
                if match:
                    behind = [i + match for i in range(len(indexed)) if indexed[i : i + match] == text[-match:]]
                    assert any(indexed[i : i + len(found)] == found for i in behind)


def everything(store: SharedStore) -> None:
    while store.has_work:
        store.work(64)


def guessed(store: SharedStore, owner: Owner, text: list[int], count: int = 20) -> list[int]:
    """What a sequence of that owner, which has that text as its answer so far, is guessed to go on with."""
    guesser = Guesser(0, SharedReader(store, owner))
    guesser.follow(text, len(text), len(text))
    return guesser.guesses(count) if guesser.survival(count) else []


def test_guesses_come_from_an_answer_of_the_same_owner_and_end_with_it() -> None:
    store = SharedStore(LEAST_BYTES)
    store.add(MINE, list(range(100, 120)))
    assert guessed(store, MINE, [7, 103, 104, 105]) == []
    everything(store)
    assert guessed(store, MINE, [7, 103, 104, 105], 4) == [106, 107, 108, 109]
    assert guessed(store, MINE, [7, 116, 117]) == [118, 119]
    assert guessed(store, MINE, [7, 118, 119]) == []
    # A text that began before the answer was there finds its place in it.
    reader = SharedReader(store, MINE)
    guesser = Guesser(0, reader)
    guesser.follow(text := [300, 301], 2, 2)
    store.add(MINE, [300, 301, 302, 303, 304])
    everything(store)
    guesser.follow([*text, 302], 3, 1)
    assert guesser.guesses(5) == [303, 304]


def test_owners_never_see_each_others_answers() -> None:
    chance = random.Random(3)
    store = SharedStore(LEAST_BYTES)
    owners: list[Owner] = [(salt, key) for salt in (b"", b"one", b"two") for key in (None, 0, 1)]
    said: dict[Owner, list[list[int]]] = {owner: [] for owner in owners}
    found = 0
    for number in range(300):
        place = chance.randrange(len(owners))
        # Beginnings that all have, and then numbers that only one has.
        own = [1000 * (place + 1) + chance.randrange(50) for _ in range(30)]
        said[owners[place]].append([5, 6, 7, *own])
        store.add(owners[place], said[owners[place]][-1])
        store.work(chance.choice([1, 20, 400]))
        assert store.num_bytes <= LEAST_BYTES, number
        for place, owner in enumerate(owners):
            for asked in (owner, owners[place - 1]):
                reader = SharedReader(store, owner)
                reader.refresh(chance.choice(said[asked] or [[5, 6, 7]])[: chance.randint(1, 25)])
                guesses = reader.following(20)
                found += bool(guesses)
                assert all(token // 1000 in (0, place + 1) for token in guesses)
    assert found > 1000


@pytest.mark.parametrize("kind", ["one token", "two tokens", "random", "words", "long runs"])
def test_the_bound_holds_for_the_memory_that_is_taken(kind: str) -> None:
    chance = random.Random(kind)
    words = [[chance.randrange(300, 50000) for _ in range(chance.randint(1, 4))] for _ in range(60)]

    def answer() -> list[int]:
        count = chance.choice([3, 100, 900])
        match kind:
            case "one token":
                return [777] * count
            case "two tokens":
                return [300 + chance.randrange(2) for _ in range(count)]
            case "random":
                return [chance.randrange(300, 50000) for _ in range(count)]
            case "words":
                return [token for _ in range(count // 2) for token in chance.choice(words)]
            case _:
                return [777] + [778] * count

    bound = 2 * LEAST_BYTES
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        store, indexed, most = SharedStore(bound), 0, 0
        while indexed < 12000:
            store.add((b"", chance.randrange(3)), made := answer())
            indexed += len(made)
            while store.has_work:
                store.work(chance.choice([1, 50, 300]))
                assert store.num_bytes <= bound
            del made
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert 0.5 * bound < most < bound
    assert store.num_bytes > 0.6 * bound


def test_the_oldest_answers_go_first_whoever_they_are_of() -> None:
    store = SharedStore(LEAST_BYTES)
    old, new = (b"", 0), (b"", 1)
    store.add(old, list(range(100, 160)))
    everything(store)
    for number in range(40):
        store.add(new, [1000 + 100 * number + i for i in range(100)])
        everything(store)
    assert guessed(store, old, [110, 111, 112]) == []
    assert guessed(store, new, [4910, 4911, 4912], 2) == [4913, 4914]
    store.add(old, list(range(100, 160)))
    everything(store)
    assert guessed(store, old, [110, 111, 112], 2) == [113, 114]


def test_work_is_no_more_than_was_asked_for_and_too_many_answers_are_left_out() -> None:
    store = SharedStore(LEAST_BYTES)
    store.add(MINE, list(range(100, 1100)))
    for done in range(0, 1000, 100):
        assert sum(len(index.tokens) for index in store.indices(MINE)) == done
        store.work(100)
    for number in range(1000):
        store.add(MINE, [10000 + number, *range(2000, 2050)])
        assert store.num_bytes <= LEAST_BYTES
    store.add(MINE, list(range(10**5, 2 * 10**5)))
    assert store.num_bytes <= LEAST_BYTES
    everything(store)
    assert guessed(store, MINE, [199990, 199991], 3) == [199992, 199993, 199994]
    with pytest.raises(ValueError, match="shared store of 1000 bytes is too small"):
        SharedStore(1000)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("llama")


def make_engine(
    model: Any, shared: int = LEAST_BYTES, adapters: dict[str, Path] | None = None
) -> tuple[Engine, Speculator]:
    config = EngineConfig(
        device="cpu", block_size=4, max_num_batched_tokens=64, max_num_seqs=6, max_model_len=200, kv_cache_bytes=2**21,
        enforce_eager=True, speculation="lookup", speculation_shared_store=shared,
        lora_modules=tuple(LoraModule(name=name, path=path) for name, path in (adapters or {}).items()),
    )  # fmt: skip
    engine = Engine(build_runner(copy.deepcopy(model), config), config)
    speculator = engine._speculator
    assert speculator is not None
    fix_costs(engine, CHEAP)
    return engine, speculator


def ask(engine: Engine, key: int | None = None, adapter: str | None = None, **options: Any) -> tuple[list[int], int]:
    """An answer of random tokens to one prompt, in which nothing repeats, and how many guesses were right."""
    before = sum(engine.stats().accepted_by_place)
    sampling = SamplingParams(**({"max_tokens": 60, "temperature": 2.0, "seed": 5, "ignore_eos": True} | options))
    request = GenerateRequest(f"r{random.random()}", list(range(3, 40)), sampling, adapter, api_key=key)
    found = tokens(run_together(engine, request)[request.request_id])
    while engine.use_idle_time():
        pass
    return found, sum(engine.stats().accepted_by_place) - before


def test_an_answer_is_guessed_from_an_earlier_one_of_the_same_key_only(model: Any) -> None:
    engine, _ = make_engine(model)
    alone, _ = make_engine(model, 0)
    expected, own = ask(alone)
    assert alone.stats().shared_store_bytes is None
    assert [ask(engine, 0), ask(engine, 1), ask(engine, None)] == [(expected, own)] * 3
    again = [ask(engine, key) for key in (0, 1, None)]
    assert [found for found, _ in again] == [expected] * 3
    assert all(right > own + 20 for _, right in again)
    assert ask(engine, 2) == (expected, own)
    taken = engine.stats().shared_store_bytes
    assert taken is not None
    assert 0 < taken <= LEAST_BYTES


def test_an_answer_is_guessed_from_an_earlier_one_of_the_same_adapter_only(model: Any, tmp_path: Path) -> None:
    """Two adapters of the same weights: their answers are the same, and yet neither's are guessed from the other's."""
    save_adapter(model, tmp_path, 0, 1e-4, r=2, target_modules=["q_proj"])
    engine, _ = make_engine(model, adapters={"one": tmp_path, "other": tmp_path})
    expected, own = ask(engine)
    assert [ask(engine, adapter=name) for name in ("one", "other")] == [(expected, own)] * 2
    assert all(ask(engine, adapter=name)[1] > own + 20 for name in ("one", "other", None))


def test_a_request_that_does_without_neither_gives_nor_takes(model: Any) -> None:
    engine, speculator = make_engine(model)
    assert speculator.store is not None
    expected, _ = ask(engine, speculation=False)
    assert speculator.store.num_bytes == 0
    ask(engine)
    assert speculator.store.num_bytes > 0
    before = speculator.store.num_bytes
    assert ask(engine, speculation=False) == (expected, 0)
    assert speculator.store.num_bytes == before


def test_cancelled_answers_are_kept_as_far_as_they_got_and_failed_ones_are_not(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, speculator = make_engine(model)
    added: list[list[int]] = []
    assert speculator.store is not None
    monkeypatch.setattr(speculator.store, "add", lambda _, answer: added.append(answer))
    engine.add(request := make_request(9, max_tokens=50, ignore_eos=True))
    said: list[int] = []
    for _ in range(6):
        said += [token for output in engine.step().outputs for token in output.new_token_ids]
    engine.abort([request.request_id])
    assert added == [said]
    assert len(said) > 1
    waiting = make_request(9)
    engine.add(waiting)
    engine.abort([waiting.request_id])
    assert len(added) == 1

    def fails(_: Step) -> Any:
        raise RuntimeError("no memory")

    engine.add(make_request(9, max_tokens=50))
    engine.step()
    monkeypatch.setattr(engine._runner, "execute", fails)
    while engine.has_work:
        engine.step()
    assert len(added) == 1


def test_answers_are_indexed_behind_steps_a_part_at_a_time(model: Any) -> None:
    engine, speculator = make_engine(model)
    store = speculator.store
    assert store is not None
    ended = Sequence(make_request(5), 0)
    ended.tokens += range(100, 400)
    speculator.note_end(ended)
    engine.add(make_request(3, max_tokens=20, ignore_eos=True))
    found = []
    while engine.has_work:
        engine.step()
        found.append(sum(len(index.tokens) for index in store.indices((b"", None))))
    assert 0 < found[0] <= 64
    assert all(0 <= later - before <= 64 for before, later in itertools.pairwise(found))
    assert found[-1] > 250


def test_only_lookup_has_a_shared_store() -> None:
    for speculation in ("off", "draft"):
        given = {"engine.speculation": speculation, "engine.speculation_shared_store": 2**24}
        if speculation == "draft":
            given["engine.draft_model"] = "a/b"
        with pytest.raises(ConfigError, match=f"speculation_shared_store is set, and speculation is {speculation}"):
            load_config(None, given)
    with pytest.raises(ConfigError, match="speculation_shared_store"):
        load_config(None, {"engine.speculation": "lookup", "engine.speculation_shared_store": 1000})
    assert load_config(None, {}).engine.speculation_shared_store == 0
