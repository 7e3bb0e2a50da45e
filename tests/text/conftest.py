"""Tokenizers of each kind: the embedded model's (byte-level), one in Llama 2's style, one that is neither."""

from __future__ import annotations

from pathlib import Path

import pytest
from llguidance import LLTokenizer
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from server.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(embedded_folder: Path) -> LLTokenizer:
    """The embedded model's as grammars have it."""
    return LLTokenizer((embedded_folder / "tokenizer.json").read_text())


@pytest.fixture(scope="session")
def byte_level(embedded_folder: Path) -> Tokenizer:
    return Tokenizer.load(embedded_folder)


@pytest.fixture(scope="session")
def byte_fallback() -> Tokenizer:
    """SentencePiece's conventions: a space mark before words, bytes for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*list("▁abcdefghijklmnopqrstuvwxyzé日"), "▁t", "he", "▁the", "▁▁"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    backend = RustTokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("<think>", special=False)])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>"))


@pytest.fixture(scope="session")
def word_pieces() -> Tokenizer:
    """A decoder that looks at neighbours: words are joined by spaces unless a piece says otherwise."""
    pieces = ["[UNK]", "[SEP]", "hello", "wor", "##ld", "##s", "日", "!"]
    backend = RustTokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(["[SEP]"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, sep_token="[SEP]"))
