"""Sequences under a grammar: what comes out matches it, neighbours are left alone, a broken grammar ends alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from server.engine.grammar import THREADED_STEPS, GrammarError, Grammars, GrammarState, MaskFiller
from server.engine.runtime.sampling.grammar_masks import MaskBuffer
from server.engine.runtime.sampling.sampler import Sampler
from server.engine.scheduling.sequence import Constraint, Sequence
from server.text.grammars.grammar import choice_grammar, json_grammar, regex_grammar, text_grammar
from server.text.tokenizer import Tokenizer
from server.types import UNFOLLOWABLE, GenerateRequest, SamplingParams
from tests.engine.factories import sample

VOCABULARY, END = 49152, 2
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "日本"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(embedded_folder: Path) -> Grammars:
    return Grammars(embedded_folder, VOCABULARY, END)


@pytest.fixture(params=["asked", "masked"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPU, where grammars are asked about tokens first, and as on CUDA, where all have masks."""
    if request.param == "masked":
        monkeypatch.setattr(Sampler, "_in_need_of_masks", lambda own, bound, tokens: bound)


def allowed(state: Constraint | None) -> bytes:
    """The tokens that may come next: bit i of byte i // 8 is token i."""
    assert isinstance(state, GrammarState)
    return state.matcher().compute_bitmask()[: VOCABULARY // 8]


def sequence(grammars: Grammars, grammar: str | None, seed: int, **options: object) -> Sequence:
    chosen = {"max_tokens": 200, "temperature": 1.0, "grammar": grammar, **options}
    sampling = SamplingParams(**chosen)  # type: ignore[arg-type]
    made = Sequence(GenerateRequest(str(seed), [1, 5], sampling), seed, frozenset({END}))
    made.bind(grammars.start(grammar) if grammar is not None else None)
    return made


def test_random_logits_give_what_the_schema_allows(grammars: Grammars, embedded_folder: Path) -> None:
    tokenizer = Tokenizer.load(embedded_folder)
    grammar = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
    random.seed()
    rows = [sequence(grammars, grammar, random.getrandbits(32), ignore_eos=i == 1) for i in range(3)]
    free = sequence(grammars, None, 9)
    for _ in range(60):
        running = [s for s in rows if s.finish_reason is None]
        logits = torch.randn(len(running) + 1, VOCABULARY) * 3
        for chosen, result in zip([*running, free], sample(logits, [*running, free]), strict=True):
            assert result.error is None
            chosen.append(result.token)
    for ended in rows:
        assert ended.finish_reason == "stop"
        text = tokenizer.decode(ended.tokens[2:])
        jsonschema.validate(json.loads(text), SCHEMA)
    assert free.num_generated == 60 or free.finish_reason == "stop"


def test_the_end_may_come_only_where_the_text_may_end(grammars: Grammars) -> None:
    wanting = sequence(grammars, LLMatcher.grammar_from_regex("[ab]{4,}"), 1)
    for _ in range(8):
        logits = torch.zeros(1, VOCABULARY)
        logits[0, END] = 100.0
        token = sample(logits, [wanting])[0].token
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
            mask = allowed(state)
            permitted = [token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1]
            known = set(permitted)
            assert alone == [token in known for token in tokens]
            state.accept(random.choice([token for token in permitted if token != END] or [END]))
            if state.done:
                break


@pytest.mark.parametrize("options", [{}, {"top_p": 0.999999}], ids=["tried first", "masked first"])
def test_sampled_tokens_keep_the_share_that_permitted_tokens_have(
    grammars: Grammars, options: dict[str, float]
) -> None:
    grammar = LLMatcher.grammar_from_regex("[abc]")
    states = [sequence(grammars, grammar, seed, **options) for seed in range(600)]
    mask = allowed(grammars.start(grammar))
    permitted = [token for token in range(VOCABULARY) if mask[token // 8] >> token % 8 & 1]
    assert len(permitted) == 3
    logits = torch.full((1, VOCABULARY), -50.0)
    logits[0, permitted] = torch.tensor([2.0, 1.0, 0.0])
    logits[0, 5000:5100] = 0.0  # without the grammar nine in ten samples are none of the three
    expected = torch.softmax(torch.tensor([2.0, 1.0, 0.0]), 0) * len(states)
    sampled = [
        result.token for i in range(0, 600, 200) for result in sample(logits.repeat(200, 1), states[i : i + 200])
    ]
    counts = torch.tensor([float(sampled.count(token)) for token in permitted])
    assert counts.sum() == len(states)
    assert ((counts - expected) ** 2 / expected).sum() < 18.4  # chi-square, 2 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 40}])
def test_sampled_tokens_depend_on_nothing_but_the_seed(grammars: Grammars, options: dict[str, float]) -> None:
    grammar = LLMatcher.grammar_from_regex("[a-e ]+")
    texts = []
    for logprobs in (None, 2):
        own = sequence(grammars, grammar, 7, logprobs=logprobs, **options)
        torch.manual_seed(5)
        for _ in range(12):
            result = sample(torch.randn(1, VOCABULARY) * 2, [own])[0]
            if own.constraint is not None and logprobs is not None:
                assert result.logprob is not None
                assert all(own.constraint.permits(token) for token, _ in result.logprob.top)
            own.append(result.token)
            if own.finish_reason is not None:
                break
        texts.append(own.tokens)
    # With log-probabilities all have masks.
    assert texts[0] == texts[1]


def test_each_of_many_is_bound_by_its_own_grammar(grammars: Grammars) -> None:
    bound = [
        sequence(grammars, LLMatcher.grammar_from_regex(f"[{letters}]{{9}}"), seed, logprobs=2)
        for seed, letters in enumerate(["a-z ", "bc", "d-y", "a-f", "0-9", "A-Z"])
    ]
    logits = torch.randn(len(bound), VOCABULARY) * 2
    constraints = [s.constraint for s in bound if s.constraint is not None]
    for row in (1, 3, 4):  # the first token that is tried is a permitted one in every other row
        permitted = next(token for token in range(VOCABULARY) if constraints[row].permits(token))
        logits[row, permitted] = 50.0
    for constraint, result in zip(constraints, sample(logits, bound), strict=True):
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
        assert [row.tobytes() for row in masks] == [allowed(state) for state in states]
    assert len({row.tobytes() for row in masks}) == len(states)


def test_masks_take_the_place_of_earlier_ones(grammars: Grammars) -> None:
    """The memory of masks is kept, and grows: none has anything of a step before."""
    rows = [sequence(grammars, LLMatcher.grammar_from_regex(f"[a-{letter}]+"), 1) for letter in "bcdefgh"]
    buffer = MaskBuffer(VOCABULARY, torch.device("cpu"))
    for some in (rows[3:5], rows[:1], rows, rows[5:], rows[2:]):
        found, failed = buffer.find(some)
        assert failed == {}
        expected = [allowed(s.constraint) for s in some]
        assert [row.numpy().tobytes() for row in found] == expected


def test_a_sequence_that_leaves_its_grammar_ends_alone(grammars: Grammars) -> None:
    good, bad = (sequence(grammars, LLMatcher.grammar_from_regex("[a-z]{9}"), seed) for seed in range(2))
    assert bad.constraint is not None
    bad.constraint.accept(20)
    alone, failed = sample(torch.randn(2, VOCABULARY), [good, bad])
    assert alone.error is None
    assert good.constraint is not None
    assert good.constraint.permits(alone.token)
    assert failed.error is not None
    assert failed.error.startswith("the model failed: GrammarError: ")


# No token of the embedded model has the byte F1, with which these characters begin, and none is U+0004.
LACKING, LACKING_CONTROL = "\U00063988", "\x04"


@pytest.mark.parametrize(
    "grammar",
    [
        choice_grammar(["hello", f"j_{LACKING}"]),
        choice_grammar([LACKING_CONTROL]),
        json_grammar({"enum": ["b", {"a": [LACKING]}]}),
        json_grammar({"properties": {"a": {"properties": {LACKING: {}}}}}),
        json_grammar({"type": "string", "pattern": f"^x{LACKING}$"}),
        regex_grammar(f"a{LACKING}b"),
        text_grammar(f'root ::= "a{LACKING}" [a-z]'),
    ],
)
def test_literals_that_no_tokens_make_up_are_named(grammars: Grammars, grammar: str) -> None:
    with pytest.raises(GrammarError, match=r"make up '\\(U00063988|x04)' \(U\+(63988|0004)\)"):
        grammars.start(grammar).matcher()
    with pytest.raises(GrammarError, match=r"make up its first bytes, b'a\\xf1'"):
        grammars.start(regex_grammar("a[\U00050000-\U00060000]b")).matcher()


def test_characters_that_no_tokens_make_up_among_others(grammars: Grammars) -> None:
    """They are not chosen; where nothing else can follow, the sequence's reason says so."""
    takes = {
        json_grammar({"enum": ["x", LACKING_CONTROL], "description": LACKING}): '"\\u0004"',
        json_grammar({"type": "string", "minLength": 1, "maxLength": 1}): '"x"',
        regex_grammar(f"a(x|{LACKING})b"): "axb",
        regex_grammar(f"a[^{LACKING}]b"): "axb",
    }
    for grammar, text in takes.items():
        assert grammars.start(grammar).permitted(grammars._tokenizer.result().tokenize_str(text)) > 0
        assert len(written(grammars, grammar)) < 30
    for lacking in (LACKING, r"\x04"):
        found = {written(grammars, regex_grammar(f"(x|a{lacking})b"), seed) for seed in range(8)} - {"xb"}
        assert found
        assert all(reason.startswith(UNFOLLOWABLE) for reason in found), found


def test_a_grammar_beyond_the_limits(grammars: Grammars) -> None:
    assert written(grammars, regex_grammar("[ab]" + "(a{1000}){1000}")).startswith(UNFOLLOWABLE)
    wide = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}}
    assert {written(grammars, json_grammar(wide), seed)[: len(UNFOLLOWABLE)] for seed in range(3)} == {UNFOLLOWABLE}


def written(grammars: Grammars, grammar: str, seed: int = 0) -> str:
    """The text of random logits, or the reason for which it has no end."""
    bound, chance, answer = sequence(grammars, grammar, seed), torch.Generator().manual_seed(seed), list[int]()
    assert isinstance(bound.constraint, GrammarState)
    while not bound.constraint.done and len(answer) < 20:
        (found,) = sample(torch.randn(1, VOCABULARY, generator=chance), [bound])
        if found.error is not None:
            return found.error
        bound.constraint.accept(found.token)
        answer.append(found.token)
    return str(grammars._tokenizer.result().decode_str(answer))


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
        assert allowed(ahead) == allowed(followed)
        assert ahead.may_end == followed.may_end
    assert ahead.ahead(END) is None
    assert ahead.ahead(text[-1]) is None  # with the last bracket nothing can follow
    # The state itself is where it was.
    assert allowed(state) == allowed(grammars.start(grammar))
    broken = grammars.start("{")
    assert broken.permitted(text) == 0
    assert broken.ahead(text[0]) is None


def test_broken_grammar(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="regex"):
        grammars.compile(LLMatcher.grammar_from_regex("(a")).result()
    with pytest.raises(GrammarError):
        grammars.start("{").permits(5)
    endless = LLMatcher.grammar_from_json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}})
    with pytest.raises(GrammarError, match="no text matches it"):
        grammars.compile(endless).result()
