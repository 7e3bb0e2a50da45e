"""Sequences under a grammar: what comes out matches it, neighbours are left alone, a broken grammar ends alone."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from server.engine.grammar import THREADED_STEPS, GrammarError, Grammars, MaskFiller
from server.engine.runtime.sampling.device_sampler import DeviceSampler
from server.engine.runtime.sampling.grammar_masks import MaskBuffer
from server.engine.runtime.sampling.sampler import Sampled, sample
from server.engine.scheduling.sequence import Sequence
from server.text.tokenizer import Tokenizer
from server.types import GenerateRequest, SamplingParams

VOCABULARY, END = 49152, 2
Choose = Callable[[torch.Tensor, list[Sequence]], list[Sampled]]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "日本"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "looked-ahead"])
def grammars(embedded_folder: Path, request: pytest.FixtureRequest) -> Grammars:
    return Grammars(embedded_folder, VOCABULARY, END, look_ahead=request.param)


@pytest.fixture(params=["tried", "masked"])
def choose(request: pytest.FixtureRequest) -> Choose:
    """The samplers: one asks about a token first, one finds all permitted ones."""
    return sample if request.param == "tried" else DeviceSampler(VOCABULARY, torch.device("cpu")).sample


def sequence(grammars: Grammars, grammar: str | None, seed: int, **options: object) -> Sequence:
    chosen = {"max_tokens": 200, "temperature": 1.0, "grammar": grammar, **options}
    sampling = SamplingParams(**chosen)  # type: ignore[arg-type]
    made = Sequence(GenerateRequest(str(seed), [1, 5], sampling), seed, frozenset({END}))
    made.constraint = grammars.start(grammar) if grammar is not None else None
    return made


def test_random_logits_give_what_the_schema_allows(grammars: Grammars, embedded_folder: Path, choose: Choose) -> None:
    tokenizer = Tokenizer.load(embedded_folder)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
    random.seed()
    rows = [sequence(grammars, grammar, random.getrandbits(32), ignore_eos=i == 1) for i in range(3)]
    free = sequence(grammars, None, 9)
    for _ in range(60):
        running = [s for s in rows if s.finish_reason is None]
        logits = torch.randn(len(running) + 1, VOCABULARY) * 3
        for chosen, result in zip([*running, free], choose(logits, [*running, free]), strict=True):
            assert result.error is None
            chosen.append(result.token)
    for ended in rows:
        assert ended.finish_reason == "stop"
        text = tokenizer.decode(ended.tokens[2:])
        jsonschema.validate(json.loads(text), SCHEMA)
    assert free.num_generated == 60 or free.finish_reason == "stop"


def test_the_end_may_come_only_where_the_text_may_end(grammars: Grammars, choose: Choose) -> None:
    wanting = sequence(grammars, LLMatcher.grammar_from_regex("[ab]{4,}"), 1)
    for _ in range(8):
        logits = torch.zeros(1, VOCABULARY)
        logits[0, END] = 100.0
        token = choose(logits, [wanting])[0].token
        wanting.append(token)
        if token == END:
            break
    assert wanting.finish_reason == "stop"
    assert wanting.num_generated >= 2


def test_single_tokens_are_permitted_as_the_mask_says(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    for grammar in (LLMatcher.grammar_from_regex("([a-z]{1,9} ){1,4}"), LLMatcher.grammar_from_json_schema(schema)):
        state = grammars.start(grammar)
        for _ in range(12):
            tokens = [END, *random.sample(range(VOCABULARY), 2000)]
            alone = [state.permits(token) for token in tokens]
            mask = state.allowed()
            permitted = [token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1]
            known = set(permitted)
            assert alone == [token in known for token in tokens]
            state.accept(random.choice([token for token in permitted if token != END] or [END]))
            if state.done:
                break
            state.look_ahead()


@pytest.mark.parametrize("options", [{}, {"top_p": 0.999999}], ids=["tried first", "masked first"])
def test_sampled_tokens_keep_the_share_that_permitted_tokens_have(
    grammars: Grammars, options: dict[str, float], choose: Choose
) -> None:
    grammar = LLMatcher.grammar_from_regex("[abc]")
    states = [sequence(grammars, grammar, seed, **options) for seed in range(600)]
    mask = grammars.start(grammar).allowed()
    permitted = [token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1]
    assert len(permitted) == 3
    logits = torch.full((1, VOCABULARY), -50.0)
    logits[0, permitted] = torch.tensor([2.0, 1.0, 0.0])
    logits[0, 5000:5100] = 0.0  # without the grammar nine in ten samples are none of the three
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), 0) * len(states)
    sampled = [
        result.token for i in range(0, 600, 200) for result in choose(logits.repeat(200, 1), states[i : i + 200])
    ]
    counts = torch.tensor([float(sampled.count(token)) for token in permitted])
    assert counts.sum() == len(states)
    assert ((counts - expected) ** 2 / expected).sum() < 18.4  # chi-square, 2 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 40}])
def test_sampled_tokens_depend_on_nothing_but_the_seed(grammars: Grammars, options: dict[str, float]) -> None:
    grammar = LLMatcher.grammar_from_regex("[a-e ]+")
    texts = []
    for found_before, on_device, logprobs in (
        (False, False, None),
        (True, False, None),
        (False, False, 2),
        (False, True, 2),
    ):
        own = sequence(grammars, grammar, 7, logprobs=logprobs, **options)
        choose = DeviceSampler(VOCABULARY, torch.device("cpu")).sample if on_device else sample
        torch.manual_seed(5)
        for _ in range(12):
            result = choose(torch.randn(1, VOCABULARY) * 2, [own])[0]
            if own.constraint is not None and logprobs is not None:
                assert result.logprob is not None
                assert all(own.constraint.permits(token) for token, _ in result.logprob.top)
            own.append(result.token)
            if own.finish_reason is not None:
                break
            if found_before and own.constraint is not None:
                own.constraint.allowed()  # known before the next token is sampled
        texts.append(own.tokens)
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_each_of_many_is_bound_by_its_own_grammar(grammars: Grammars, choose: Choose) -> None:
    bound = [
        sequence(grammars, LLMatcher.grammar_from_regex(f"[{letters}]{{9}}"), seed, logprobs=2)
        for seed, letters in enumerate(["a-z ", "bc", "d-y", "a-f", "0-9", "A-Z"])
    ]
    logits = torch.randn(len(bound), VOCABULARY) * 2
    constraints = [s.constraint for s in bound if s.constraint is not None]
    for row in (1, 3, 4):  # the first token that is tried is a permitted one in every other row
        permitted = next(token for token in range(VOCABULARY) if constraints[row].permits(token))
        logits[row, permitted] = 50.0
    for constraint, result in zip(constraints, choose(logits, bound), strict=True):
        assert result.logprob is not None
        assert all(constraint.permits(token) for token in (result.token, *(t for t, _ in result.logprob.top)))


@pytest.mark.parametrize("quick_s", [0.0, 60.0], ids=["threads", "one after another"])
def test_masks_of_many_are_those_of_each(grammars: Grammars, quick_s: float) -> None:
    states = [grammars.start(LLMatcher.grammar_from_regex(f"[a-{letter}]+x?")) for letter in "bcdefgh"]
    masks = np.full((len(states), VOCABULARY // 32), -1, np.int32)
    filler = MaskFiller(quick_s)
    # After the first step in which there was no time all masks are found on threads, until another one is tried.
    for _ in range(2 if quick_s else THREADED_STEPS + 3):
        masks[:] = -1
        assert filler.fill(states, masks) == {}
        assert [row.tobytes() for row in masks] == [state.allowed()[: VOCABULARY // 8] for state in states]
    assert len({row.tobytes() for row in masks}) == len(states)


def test_masks_take_the_place_of_earlier_ones(grammars: Grammars) -> None:
    """The memory of masks is kept, and grows: none has anything of a step before."""
    rows = [sequence(grammars, LLMatcher.grammar_from_regex(f"[a-{letter}]+"), 1) for letter in "bcdefgh"]
    buffer = MaskBuffer(VOCABULARY, torch.device("cpu"))
    for some in (rows[3:5], rows[:1], rows, rows[5:], rows[2:]):
        found, failed = buffer.find(some)
        assert failed == {}
        expected = [s.constraint.allowed()[: VOCABULARY // 8] for s in some if s.constraint is not None]
        assert [row.numpy().tobytes() for row in found] == expected


def test_a_sequence_that_leaves_its_grammar_ends_alone(grammars: Grammars) -> None:
    good, bad = (sequence(grammars, LLMatcher.grammar_from_regex("[a-z]{9}"), seed) for seed in range(2))
    assert bad.constraint is not None
    bad.constraint.accept(20)
    alone, failed = DeviceSampler(VOCABULARY, torch.device("cpu")).sample(torch.randn(2, VOCABULARY), [good, bad])
    assert alone.error is None
    assert good.constraint is not None
    assert good.constraint.permits(alone.token)
    assert failed.error is not None
    assert failed.error.startswith("the model failed: GrammarError: ")


def test_the_state_behind_tokens_that_may_come(grammars: Grammars, embedded_folder: Path) -> None:
    tokenizer = Tokenizer.load(embedded_folder)
    text = tokenizer.encode('{"a": 12, "b": "x"}')
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA)
    state = grammars.start(grammar)
    assert state.permitted(text) == len(text)
    assert state.permitted([*text[:3], END, *text[3:]]) == 3
    assert state.permitted([END]) == 0
    ahead, followed = state, grammars.start(grammar)
    for token in text[:-1]:
        behind = ahead.ahead(token)
        assert behind is not None
        ahead = behind
        followed.accept(token)
        followed.look_ahead()
        assert ahead.allowed() == followed.allowed()
        assert ahead.may_end == followed.may_end
    assert ahead.ahead(END) is None
    assert ahead.ahead(text[-1]) is None  # with the last bracket nothing can follow
    # The state itself is where it was.
    assert state.allowed() == grammars.start(grammar).allowed()
    broken = grammars.start("{")
    assert broken.permitted(text) == 0
    assert broken.ahead(text[0]) is None


def test_a_search_that_has_not_begun_is_given_up(embedded_folder: Path) -> None:
    grammars = Grammars(embedded_folder, VOCABULARY, END, look_ahead=True)
    first, second = (grammars.start(LLMatcher.grammar_from_regex("[a-z]+")) for _ in range(2))
    letter = next(token for token in range(VOCABULARY) if first.permits(token))
    begun, go_on = threading.Event(), threading.Event()
    assert grammars._ahead is not None

    def busy() -> None:
        begun.set()
        go_on.wait()

    grammars._ahead.submit(busy)
    begun.wait()
    second.accept(letter)
    second.look_ahead()
    assert not second.is_known()
    assert second.permits(letter)
    # Nor does anything else wait for it.
    second.look_ahead()
    assert second.permitted([letter]) == 1
    second.look_ahead()
    second.accept(letter)
    go_on.set()
    for _ in range(2):
        first.accept(letter)
    first.look_ahead()
    assert first.allowed() == second.allowed()
    assert first.is_known()


def test_broken_grammar(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="regex"):
        grammars.compile(LLMatcher.grammar_from_regex("(a")).result()
    with pytest.raises(GrammarError):
        grammars.start("{").allowed()
    endless = LLMatcher.grammar_from_json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
    with pytest.raises(GrammarError, match="no text matches it"):
        grammars.compile(endless).result()
