"""Every field of the configuration as a page: python -m server.config.reference > docs/configuration.md."""

from __future__ import annotations

import json
from typing import get_args

from pydantic.fields import FieldInfo

from server.config import default_cache_dir
from server.config.flags import SECTIONS, fields, flag

HEAD = """\
# Configuration

A field is taken from config.yaml, then from an environment variable, then from a flag; the last one wins. `--config FILE`
names the file; else `config.yaml` in the current folder is read if it is there. In the file, a field of a section stands
below the section's name; [config.yaml](../config.yaml) has all fields with their defaults. Numbers of bytes may be written
as `2GiB`. Lists are separated by commas in a variable, or JSON, and by spaces after a flag. This page is made from the code
by `python -m server.config.reference`.
"""
TAIL = """\
## Variables that are no fields

| variable | |
| --- | --- |
| `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` | The hub's token, the folder of its models, and 1 to ask it for nothing. |
| `XDG_CACHE_HOME` | Where caches are kept: converted checkpoints, compiled kernels; default `~/.cache`. |
| `CUDA_VISIBLE_DEVICES` | The GPUs that the server sees. |
| `CUDA_HOME` | A CUDA toolkit, to compile kernels with. |
| `NF4_CPU_ISA` | An instruction set in place of the CPU's best: portable, avx2, avx512vnni or amx. |
| `NF4_CUDA_ARCHS` | GPU targets to compile for, such as `80;90a`. |
| `NF4_WRITTEN_LAYERS` | 0: decoder layers run by transformers' own code. |
| `NF4_POSE_AS` | To test: the capability of an older GPU, such as 86, whose kernels are chosen. |
| `NF4_TUNE` | on: a start measures which launches of GEMMs are fastest, except on Hopper; off: no such times are used. |
| `NF4_KERNELS_VLLM` | 0: vLLM is left as it is ([clients](clients.md#vllm-and-transformers-serve)). |
"""
_TITLES = {
    "": ("Model, names and logs", ""),
    "http": ("http", "Where and how the API listens, and what it accepts."),
    "engine": ("engine", "How the model is run."),
}


def page() -> str:
    """The page, in Markdown."""
    parts = [HEAD]
    for section in SECTIONS:
        title, about = _TITLES[section]
        parts += [f"## {title}\n", *([f"{about}\n"] if about else [])]
        parts += ["| field | flag | variable | default | |", "| --- | --- | --- | --- | --- |"]
        parts += [_row(section, name, field) for name, field in fields(section).items()]
        parts.append("")
    return "\n".join([*parts, TAIL])


def _row(section: str, name: str, field: FieldInfo) -> str:
    dotted = f"{section}.{name}".lstrip(".")
    flags = f"`{flag(name)}`"
    if bool in {field.annotation, *get_args(field.annotation)}:
        flags += f", `{flag(f'no_{name}')}`"
    variable = f"NF4_{dotted.replace('.', '__').upper()}"
    text = " ".join((field.description or "").replace("None", "null").split()).replace("|", "\\|")
    return f"| `{dotted}` | {flags} | `{variable}` | {_default(field)} | {text} |"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default == default_cache_dir():
        return "`~/.cache/nf4-server`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{json.dumps(default)}`".replace('"', "")


if __name__ == "__main__":
    print(page(), end="")
