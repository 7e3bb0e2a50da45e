"""Grammars with tokenizers of other kinds than the embedded model's, and matchers that fail."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from server.engine.grammar import GrammarError, Grammars, GrammarState
from server.engine.scheduling.sequence import Sequence
from server.text.dialect import Dialect
from server.text.grammars.grammar import after_thoughts, choice_grammar, json_grammar, tools_grammar
from server.text.reasoning import MARKS
from server.types import GenerateRequest, SamplingParams

END = 0
BYTES = pre_tokenizers.ByteLevel
PRE_TOKENIZERS = {
    "a space in front": lambda: BYTES(add_prefix_space=True),
    "in a sequence": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(), BYTES(add_prefix_space=True)]),
    "no space": lambda: BYTES(add_prefix_space=False),
}


@pytest.fixture(params=PRE_TOKENIZERS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A byte-level tokenizer, which may put a space in front of every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[request.param](), decoders.ByteLevel()
    texts = ["Hello there, hello there, a > b, and so on and on"] * 9
    alphabet = BYTES.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<|end|>", "[INST]"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def written(state: GrammarState, tokenizer: Tokenizer, choose: int) -> str:
    """Text that comes out if the first or last of the permitted tokens is taken every time."""
    tokens: list[int] = []
    while not state.done:
        allowed = state.matcher().compute_bitmask()
        permitted = [i for i in range(tokenizer.get_vocab_size()) if i != END and allowed[i // 8] >> i % 8 & 1]
        if not permitted:
            break
        tokens.append(permitted[choose])
        state.accept(tokens[-1])
    return str(tokenizer.decode(tokens))


def test_an_answer_is_its_grammar_s_text(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    schema = {"type": "object", "properties": {"ab": {"const": "x y 12"}}, "required": ["ab"], "additionalProperties": False,
              "x-guidance": {"key_separator": ": ", "item_separator": ", ", "whitespace_flexible": False}}  # fmt: skip
    wanted = {
        text: choice_grammar([text]) for text in ("a>", "Hello there", " there", "12 and 34", "a<|end|>", "[INST]b")
    }
    wanted['{"ab": "x y 12"}'] = json_grammar(schema)
    for vocab_size in (None, 512, 300):  # the tokenizer's, and what models of more and of fewer rows have
        grammars = Grammars(folder, vocab_size, END)
        for text, grammar in wanted.items():
            for choose in (0, -1):
                assert written(grammars.start(grammar), tokenizer, choose) == text
        grammars.close()


def test_a_matcher_that_fails_is_not_done(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    grammars = Grammars(folder, None, END)
    grammar = choice_grammar(["a>"])
    sequence = Sequence(GenerateRequest("0", [1], SamplingParams(max_tokens=9, grammar=grammar)), 0, frozenset({END}))
    state = grammars.start(grammar)
    sequence.bind(state)
    wrong, right = tokenizer.token_to_id("b"), tokenizer.token_to_id("a")
    assert state.permits(right)
    sequence.append(wrong)
    assert not state.done
    assert sequence.finish_reason is None
    with pytest.raises(GrammarError):
        state.permits(right)
    finished = grammars.start(grammar)
    for text in "a>":
        assert not finished.done
        finished.accept(tokenizer.token_to_id(text))
    assert finished.done
    grammars.close()


@pytest.mark.parametrize("folder", ["no space"], indirect=True)
@pytest.mark.parametrize("special", [False, True])
def test_marks_are_tokens(folder: Path, special: bool) -> None:
    """Qwen's and GLM's are added tokens that are not special; llguidance takes all of the form <...> for special ones."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in texts}
    dialect = Dialect("hermes", MARKS[0], None)
    form = {"function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    calls = tools_grammar(dialect, [form], ids.get, several=False)
    thinking = after_thoughts(choice_grammar(["a>"]), dialect, ids.get, opened=True)
    for size in (None, 512):
        grammars = Grammars(folder, size, END)
        state = grammars.start(calls)
        call = tokenizer.encode('<tool_call>\n{"name":"f","arguments":{}}\n</tool_call>').ids
        assert call[0] == ids["<tool_call>"]
        for token in call:
            assert state.permits(token)
            state.accept(token)
        assert state.done
        state = grammars.start(thinking)
        for token in (*tokenizer.encode("so on").ids, ids["</think>"], *tokenizer.encode("a>").ids):
            assert state.permits(token)
            state.accept(token)
        assert state.done
        text = "a </think>"  # what a client wants to read is text
        assert written(grammars.start(choice_grammar([text])), tokenizer, 0) == text
        grammars.close()


@pytest.mark.parametrize("folder", ["no space"], indirect=True)
def test_tags_of_a_vocabulary_are_text(folder: Path) -> None:
    """Gemma's vocabulary has <table> and its like, which are added tokens, too."""
    document = json.loads((folder / "tokenizer.json").read_text())
    table = document["model"]["vocab"]["<table>"] = len(document["model"]["vocab"])
    document["added_tokens"].append(document["added_tokens"][0] | {"id": table, "content": "<table>", "special": False})
    (folder / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<table>").ids == [table]
    grammars = Grammars(folder, None, END)
    assert written(grammars.start(choice_grammar(["<table>x"])), tokenizer, 0) == "<table>x"
    state = grammars.start(json_grammar({"type": "string"}))
    state.accept(tokenizer.token_to_id('"'))
    assert state.permits(table)
    grammars.close()
