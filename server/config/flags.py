"""The command line: a flag for every field of the configuration, named as vLLM's if it has one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic.fields import FieldInfo

from server.config import Config, ConfigError
from server.version import running_version

SECTIONS = ("", "http", "engine")
_TITLES = {"": "model", "http": "http: where and how the API listens", "engine": "engine: how the model is run"}
_SPECULATION = {"ngram": "lookup", "lookup": "lookup", "draft_model": "draft", "draft": "draft"}
"""vLLM's methods of --speculative-config, and ours."""


def fields(section: str) -> dict[str, FieldInfo]:
    """The fields of a section ("" for those outside of sections), by name."""
    owner = Config if not section else Config.model_fields[section].annotation
    assert owner is not None
    return {name: field for name, field in owner.model_fields.items() if name not in SECTIONS}


def dotted_names() -> list[str]:
    """The names of all fields: "model", "http.port"."""
    return [f"{section}.{name}".lstrip(".") for section in SECTIONS for name in fields(section)]


def flag(name: str) -> str:
    """The flag of a field: "--max-model-len" of "max_model_len"."""
    return f"--{name.replace('_', '-')}"


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """ "; did you mean X?" if one of the known names is close to this one."""
    close = get_close_matches(name, known, 1, 0.7)
    return f"; did you mean {close[0]}?" if close else ""


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> NoReturn:
        """End with the version, which git is asked for in a checkout."""
        print(parser.prog, running_version())
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """End with the message in one line."""
        self.exit(2, f"error: {message}; {self.prog} --help lists all options\n")


def parse(arguments: Sequence[str] | None) -> tuple[Path | None, dict[str, Any], dict[str, str]]:
    """The configuration's file, the fields that flags set, by dotted name, and the flag of each.

    Ends the process after --help and --version, and with status 2 for what is no option. Raises ConfigError.
    """
    parser, names = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    if unknown:
        name = unknown[0].partition("=")[0]
        parser.error(f"unknown option {name}{did_you_mean(name, flags)}")
    found = {name: value for name, value in vars(parsed).items() if value is not None}
    words = [word for i, word in enumerate(found.pop("words", [])) if i or word != "serve"]
    if len(words) > 1:
        parser.error(f"one model is served, and {' and '.join(words)} are named")
    if words:
        found.setdefault("model", words[0])
    config = found.pop("config", None)
    found.pop("enable_lora", None)
    sources = {name: names.get(name, "MODEL") for name in found}
    if (speculation := found.pop("speculative_config", None)) is not None:
        for name, value in _speculation(speculation).items():
            found[name], sources[name] = value, "--speculative-config"
    return config, {n: ",".join(v) if isinstance(v, list) else v for n, v in found.items()}, sources


def _parser() -> tuple[argparse.ArgumentParser, dict[str, str]]:
    """The parser, and each field's flag by its dotted name."""
    parser = _Parser(
        prog="nf4-server",
        usage="nf4-server [serve] [MODEL] [options]\n       nf4-server fits [MODEL] [--gpu-memory 12GiB] [options]",
        description="OpenAI-compatible server for bitsandbytes NF4 models. fits says whether a model fits a GPU, without "
        "loading it. A flag wins over NF4_* variables, those over the file. Bytes may be written as 2GiB.",
        allow_abbrev=False,
    )
    parser.add_argument("words", nargs="*", metavar="MODEL", help="as --model")
    parser.add_argument("--version", action=_Version, nargs=0, help="say the version and end")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: config.yaml, if it is in this folder")
    names = {}
    for section in SECTIONS:
        group = parser.add_argument_group(_TITLES[section])
        for name, field in fields(section).items():
            dotted = f"{section}.{name}".lstrip(".")
            names[dotted] = flag(name)
            _add(group, dotted, [flag(name), *({"api_keys": ["--api-key"]}.get(name, []))], field)
    group = parser.add_argument_group("as in vLLM")
    group.add_argument("--enable-lora", action="store_true", default=None, help="not needed with --lora-modules")
    group.add_argument("--speculative-config", metavar="JSON", help='{"method": "ngram"} or {"model": DRAFT_MODEL}')
    return parser, names


def _add(group: argparse._ArgumentGroup, dotted: str, flags: list[str], field: FieldInfo) -> None:
    default = field.get_default(call_default_factory=True)
    shown = "automatic" if default is None else "none" if default == () else str(default)
    text = " ".join((field.description or "").split("\n\n")[0].split())
    help_text = f"{text} (default: {shown})".strip().replace("%", "%%")
    kinds = {field.annotation, *get_args(field.annotation)}
    if bool in kinds:
        group.add_argument(*flags, dest=dotted, action=argparse.BooleanOptionalAction, default=None, help=help_text)
    elif isinstance(default, tuple) or dotted == "served_model_name":
        group.add_argument(*flags, dest=dotted, nargs="+", metavar="X", help=help_text)
    else:
        metavar = "N" if kinds & {int, float} else "X"
        group.add_argument(*flags, dest=dotted, metavar=metavar, help=help_text)


def _speculation(text: str) -> dict[str, str]:
    """The fields that vLLM's --speculative-config stands for. Raises ConfigError."""
    try:
        document = json.loads(text)
        method = document.get("method", "draft_model" if "model" in document else "")
        found = {"engine.speculation": _SPECULATION[method]}
    except (ValueError, AttributeError, KeyError) as e:
        raise ConfigError(f"--speculative-config: {text!r} has no method among {', '.join(_SPECULATION)}") from e
    return found | ({"engine.draft_model": str(document["model"])} if found["engine.speculation"] == "draft" else {})
