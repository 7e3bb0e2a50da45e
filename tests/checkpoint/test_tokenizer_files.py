"""Tokenizers that a checkpoint lacks or has in another form: what it is and what helps, in one line."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

from server.checkpoint.diagnosis import end_tokens
from server.checkpoint.tokenizer_files import load_tokenizer
from tests.checkpoint.layouts import refusal

# A SentencePiece model begins with a protocol buffer's field 1; a tiktoken file has lines of base64 and rank.
SENTENCEPIECE = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"
TIKTOKEN = b"YQ== 0\nYg== 1\n"


def folder_with(folder: Path, model_type: str = "llama", **files: bytes) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return folder


def refused(folder: Path) -> str:
    return refusal(lambda: load_tokenizer(folder), folder)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "mistral", "gpt2"])
def test_no_tokenizer_at_all(tmp_path: Path, model_type: str) -> None:
    assert "has no tokenizer (tokenizer.json); copy" in refused(folder_with(tmp_path, model_type))


@pytest.mark.parametrize(("content", "package"), [(SENTENCEPIECE, "sentencepiece"), (TIKTOKEN, "tiktoken")])
def test_a_vocabulary_that_takes_a_package_names_it(
    tmp_path: Path, content: bytes, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    message = refused(folder_with(tmp_path, tokenizer__model=content))
    assert f"there is only tokenizer.model, which another package reads: pip install {package}" in message


@pytest.mark.parametrize("name", ["tokenizer__json", "tokenizer_config__json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    assert name.replace("__", ".") in refused(folder_with(tmp_path, **{"tokenizer__json": b"{}", name: content}))


def test_a_configuration_that_is_refused_is_named(tmp_path: Path) -> None:
    """Not the tokenizer, for which transformers reads it, too."""
    folder = folder_with(tmp_path, tokenizer__json=b"{}")
    (folder / "config.json").write_text(
        '{"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"]}'
    )
    assert f"{folder / 'config.json'}: transformers cannot read it" in refused(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("written", ["<|im_end|>", {"content": "<|im_end|>", "special": True}])
def test_answers_end_by_the_tokenizers_token_too(tmp_path: Path, name: str, written: object) -> None:
    """Fine-tunes of base models have an end of their own in the tokenizer alone."""
    document = {"version": "1.0", "added_tokens": [{"id": 7, "content": "<|im_end|>"}], "model": {}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert end_tokens(tmp_path) is None
    (tmp_path / name).write_text(json.dumps({"eos_token": written}))
    ends = end_tokens(tmp_path)
    assert ends is not None
    assert ends.eos_token_id == [7]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 3}))
    ends = end_tokens(tmp_path)
    assert ends is not None
    assert ends.eos_token_id == [3, 7]


def test_a_tokenizer_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "its tokenizer cannot be loaded" in refused(folder_with(tmp_path, tokenizer__json=b"{}"))


def test_mistrals_tekken_is_converted(tmp_path: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"ab", b"abc"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    vocabulary = {
        "config": {
            "pattern": "\\p{L}+|\\p{N}| ?[^\\s\\p{L}\\p{N}]+|\\s+", "num_vocab_tokens": 258, "default_vocab_size": 263,
            "default_num_special_tokens": 5, "version": "v3",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)
        ],
        "special_tokens": [{"rank": i, "token_str": s, "is_control": True} for i, s in enumerate(special)],
    }  # fmt: skip
    tokenizer = load_tokenizer(folder_with(tmp_path, "mistral", tekken__json=json.dumps(vocabulary).encode()))
    ids = tokenizer.encode("ab abc", add_special_tokens=False)
    assert ids == [5 + 256, 5 + ord(" "), 5 + 257]
    assert tokenizer.decode(ids) == "ab abc"


def test_a_processors_chat_template_is_the_tokenizers(tmp_path: Path) -> None:
    vocabulary = {"vocab__json": b'{"a": 0, "<|endoftext|>": 1}', "merges__txt": b"#version: 0.2\n"}
    template = {"chat_template": "{{ messages[0]['content'] }}"}
    files = {**vocabulary, "chat_template__json": json.dumps(template).encode()}
    assert load_tokenizer(folder_with(tmp_path, "gpt2", **files)).chat_template == template["chat_template"]


IN_TWO_THREADS = """
import sys, threading
from pathlib import Path
from server.engine.grammar import Grammars
from server.text.tokenizer import Tokenizer
folder = Path(sys.argv[1])
failed = []
def load():
    try:
        Tokenizer.load(folder).close()
    except BaseException as e:
        failed.append(e)
threads = [threading.Thread(target=load) for _ in range(3)]
grammars = Grammars(folder)
for thread in threads: thread.start()
for thread in threads: thread.join()
grammars._tokenizer.result()
assert not failed, failed
"""


def test_threads_that_load_it_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    """In a process of its own, where transformers has not been imported; the grammars' thread imports it, too."""
    vocabulary = {chr(i): i for i in range(33, 127)} | {"<|endoftext|>": 127, "Ġ": 128}
    files = {"vocab__json": json.dumps(vocabulary).encode(), "merges__txt": b"#version: 0.2\n"}
    folder = folder_with(tmp_path, "gpt2", **files)
    done = subprocess.run(
        [sys.executable, "-c", IN_TWO_THREADS, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
