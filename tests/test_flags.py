"""The command line: every field has a flag, vLLM's names work, and what is wrong is named with its source."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from server import command_line
from server.config import Config, ConfigError
from server.config.flags import dotted_names, parse
from server.config.sources import load_config


@pytest.fixture(autouse=True)
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without config.yaml, and no variables."""
    for name in [name for name in os.environ if name.startswith("NF4_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def configured(*arguments: str) -> Config:
    return command_line._configuration(arguments)


def test_a_model_is_named_with_and_without_serve() -> None:
    assert configured().model == Config().model
    for arguments in (["a/b"], ["serve", "a/b"], ["serve", "--model", "a/b"], ["--port", "1", "a/b"]):
        assert configured(*arguments).model == "a/b"


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        (["--tensor-parallel-size", "2"], "engine.tensor_parallel_size", 2),
        (["--max-model-len", "4096"], "engine.max_model_len", 4096),
        (["--kv-cache-dtype", "int8"], "engine.kv_cache_dtype", "int8"),
        (["--enforce-eager"], "engine.enforce_eager", True),
        (["--no-enable-prefix-caching"], "engine.enable_prefix_caching", False),
        (["--api-key", "a", "b"], "http.api_keys", ("a", "b")),
        (["--served-model-name", "a", "b"], "served_model_name", ("a", "b")),
        (["--speculative-config", '{"method": "ngram"}'], "engine.speculation", "lookup"),
        (["--speculative-config", '{"model": "x/y", "num_speculative_tokens": 3}'], "engine.draft_model", "x/y"),
        (["--kv-cache-bytes", "2GiB"], "engine.kv_cache_bytes", 2 << 30),
        (["--kv-cache-bytes", "1.5g"], "engine.kv_cache_bytes", 3 << 29),
        (["--max-body-bytes", "512 KiB"], "http.max_body_bytes", 512 << 10),
    ],
)
def test_names_of_vllm_and_sizes(arguments: list[str], field: str, value: Any) -> None:
    found: Any = configured(*arguments)
    for part in field.split("."):
        found = getattr(found, part)
    assert found == value


def test_adapters_are_given_as_in_vllm() -> None:
    modules = configured("m", "--enable-lora", "--lora-modules", "sql=/a", "law=/b").engine.lora_modules
    assert [(module.name, str(module.path)) for module in modules] == [("sql", "/a"), ("law", "/b")]


def test_every_field_has_a_flag_and_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name in dotted_names():
        flag = f"--{name.rpartition('.')[2].replace('_', '-')}"
        assert f"{flag} " in said or f"{flag}," in said, flag
    assert "127.0.0.1)" in said
    assert said.count("(default: ") >= len(dotted_names())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--max-modle-len", "5"], "unknown option --max-modle-len; did you mean --max-model-len?"),
        (["--zzz"], "unknown option --zzz;"),
        (["serve", "a", "b"], "one model is served, and a and b are named"),
    ],
)
def test_what_is_no_option_ends_with_one_line(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(arguments)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert reason in said


def test_errors_name_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: str) -> str:
        with pytest.raises(ConfigError) as caught:
            configured(*arguments)
        return str(caught.value)

    assert refused("--port", "99999").startswith("--port: http.port: ")
    assert refused("--port", "99999").endswith(", got '99999'")
    assert refused("--kv-cache-bytes", "2GB") == (
        "--kv-cache-bytes: engine.kv_cache_bytes: bytes are a number, or written as 2GiB, 512MiB or 64KiB, got '2GB'"
    )
    file = tmp_path / "config.yaml"
    file.write_text("model: m\nhttp:\n  prot: 5\n")
    assert refused() == "config.yaml:3: http.prot: there is no such field; did you mean http.port?"
    file.write_text("engine:\n  device: tpu\n")
    assert refused().startswith("config.yaml:2: engine.device: ")
    file.write_text("http: 8080\n")
    monkeypatch.setenv("NF4_HTTP__PORT", "1")
    assert refused() == "config.yaml:1: http: expected a mapping, got '8080'"
    file.unlink()
    monkeypatch.setenv("NF4_ENGINE__DTYPE", "int3")
    assert refused().startswith("NF4_ENGINE__DTYPE: engine.dtype: ")
    assert refused("--speculative-config", "{}").startswith("--speculative-config: ")


def test_the_file_of_this_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: here\n")
    assert configured().model == "here"
    (tmp_path / "other.yaml").write_text("http: {port: 5}\n")
    assert configured("--config", "other.yaml").model == Config().model
    assert load_config(None).model == Config().model
