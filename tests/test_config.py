"""Configuration: file, environment, flags; the last one wins, and nothing unknown gets through."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import nf4_kernels
from server.config import Config, ConfigError
from server.config.reference import page
from server.config.sources import KERNEL_VARIABLES, load_config

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("NF4_")]:
        monkeypatch.delenv(name)


def test_the_files_values_are_the_defaults_and_it_has_every_field() -> None:
    path = Path("config.yaml")
    assert load_config(path) == Config()
    text = path.read_text()

    def fields(section: dict[str, Any], values: dict[str, Any]) -> None:
        for name in section:
            assert name in values or f"# {name}:" in text, name

    values = yaml.safe_load(text)
    fields(Config.model_fields, values)
    for section in ("http", "engine"):
        fields(type(getattr(Config(), section)).model_fields, values[section])


def test_flags_win_over_variables_win_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: a\nhttp: {port: 1, host: h}\nlog_level: error")
    monkeypatch.setenv("NF4_HTTP__PORT", "2")
    monkeypatch.setenv("NF4_MODEL", "b")
    monkeypatch.setenv("NF4_CPU_ISA", "avx2")
    config = load_config(path, {"model": "c", "http.host": None})
    assert (config.model, config.http.port, config.http.host, config.log_level) == ("c", 2, "h", "error")


def test_off_needs_no_quotation_marks_in_yaml(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("engine: {speculation: off, quantize_output_layer: off, expanded_weights: off, images: off}")
    engine = load_config(path).engine
    assert (engine.speculation, engine.quantize_output_layer, engine.expanded_weights) == ("off", "off", "off")
    assert engine.images is False


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("htp: {}", "htp"),
        ("http: {prt: 1}", "http.prt"),
        ("http: {port: 70000}", "http.port"),
        ("engine: {device: tpu}", "engine.device"),
        ("http: {tls_cert_file: /nowhere/cert}", "belong together"),
        ("engine: {lora_modules: [{name: a, path: x}, {name: a, path: y}]}", "lora_modules names 'a' twice"),
        ("engine: {lora_modules: [{name: a, path: x}, {name: b, path: y}], max_loras: 1}", "max_loras is 1"),
        ("engine: {lora_modules: [{name: m, path: x}]}\nmodel: m", "'m' is the model's own name"),
        ("engine: {speculation: draft}", "engine: speculation is draft"),
        ("- a", "expected a mapping"),
        ("a: [", "not valid YAML"),
    ],
)
def test_errors_name_the_field_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=reason) as raised:
        load_config(path)
    assert "\n" not in str(raised.value)


def test_adapters_can_be_named_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NF4_ENGINE__LORA_MODULES", "sql=/adapters/sql, chat=~/chat")
    modules = load_config(None).engine.lora_modules
    assert [(m.name, m.path) for m in modules] == [("sql", Path("/adapters/sql")), ("chat", Path.home() / "chat")]


def test_a_model_may_have_several_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: m\nserved_model_name: [a, b]")
    config = load_config(path)
    assert (config.model_name, config.model_names) == ("a", ("a", "b"))
    monkeypatch.setenv("NF4_SERVED_MODEL_NAME", "c, d")
    assert load_config(path).model_names == ("c", "d")
    assert load_config(None, {"served_model_name": "e"}).model_names == ("e",)
    monkeypatch.delenv("NF4_SERVED_MODEL_NAME")
    assert load_config(None, {"model": "m"}).model_names == ("m",)


def test_lists_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for written in ("https://a, https://b", '["https://a", "https://b"]'):
        monkeypatch.setenv("NF4_HTTP__CORS_ORIGINS", written)
        assert load_config(None).http.cors_origins == ("https://a", "https://b")
    for written, hosts in (("[]", ()), (' [ "a" ]', ("a",)), ("[::1]:80", ("[::1]:80",))):
        monkeypatch.setenv("NF4_HTTP__IMAGE_HOSTS", written)
        assert load_config(None).http.image_hosts == hosts
    monkeypatch.setenv("NF4_HTTP__CORS_ORIGINS", '["https://a"')
    with pytest.raises(ConfigError, match=r"NF4_HTTP__CORS_ORIGINS: http\.cors_origins"):
        load_config(None)


def test_a_folder_is_served_under_its_last_part_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My-Model"
    assert Config(model=str(folder)).model_names == (str(folder),)
    folder.mkdir()
    assert Config(model=str(folder)).model_names == (str(folder), "My-Model")
    assert Config(model=f"{folder}/").model_names[1] == "My-Model"
    monkeypatch.chdir(tmp_path)
    assert Config(model="My-Model").model_names == ("My-Model",)
    assert Config(model="./My-Model").model_names == ("./My-Model", "My-Model")
    (tmp_path / "link").symlink_to(folder)
    assert Config(model="./link").model_names == ("./link", "link")
    assert Config(model="a/b").model_names == ("a/b",)
    assert Config(model=str(folder), served_model_name="x").model_names == ("x",)


def test_home_is_expanded() -> None:
    assert load_config(None, {"cache_dir": "~/x"}).cache_dir == Path.home() / "x"


def test_the_page_of_fields_is_up_to_date() -> None:
    assert page() == (DOCS / "configuration.md").read_text(encoding="utf-8"), (
        "run `python -m server.config.reference > docs/configuration.md`"
    )


def test_every_field_says_what_it_does() -> None:
    assert " |  |\n" not in page()


def test_variables_of_the_kernels_are_no_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = Path(nf4_kernels.__file__).parent.rglob("*.py")
    read = {name for source in sources for name in re.findall(r'"(NF4_[A-Z_]+)"', source.read_text(encoding="utf-8"))}
    assert read == KERNEL_VARIABLES
    assert all(f"`{name}`" in page() for name in read)
    for name in read:
        monkeypatch.setenv(name, "0")
    load_config(None)
