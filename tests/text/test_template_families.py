"""Messages in the forms that families' templates want: ids of calls, one call a message, efforts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.text.dialect import Dialect, Effort
from tests.text.templates import USER, Templated

CHECKS_IDS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[{{ c.id }}]{% endfor %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('no id') }}{% endif %}[{{ m.tool_call_id }}]"
    "{% endif %}{% endfor %}"
)


def test_ids_of_calls_fit_a_template_that_checks_them(embedded_folder: Path) -> None:
    """A conversation that began with another model goes on with one of Mistral's."""

    def ids(template: str, *given: str) -> list[str]:
        calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": {}}} for name in given]
        results = [{"role": "tool", "content": "1", "tool_call_id": name} for name in given]
        messages: list[dict[str, Any]] = [USER, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
        text = Templated(embedded_folder, template).render(messages)
        return [part.split("[")[-1] for part in text.split("]")[:-1] if not part.endswith("TOOL_CALLS")]

    given = ("call_abc-1234567890", "toolu_01A", "abc123XYZ", "call_abc-1234567891", "")
    found = ids(CHECKS_IDS, *given)
    assert found[:5] == found[5:]
    assert len(set(found)) == 5
    assert all(len(one) == 9 and one.isalnum() for one in found)
    assert found[2] == "abc123XYZ"
    assert found == ids(CHECKS_IDS, *given)
    assert ids(CHECKS_IDS.replace("length != 9", "length > 99"), *given)[:5] == list(given)


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Hi"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {
                "id": str(i),
                "type": "function",
                "function": {"name": f"f{i}", "arguments": {"a": "x", "b": [True, None]}},
            }
            for i in range(2)
        ],
    },
    *({"role": "tool", "tool_call_id": str(i), "name": f"f{i}", "content": f"r{i}"} for i in range(2)),
]


def test_harmony_has_one_call_in_a_message(embedded_folder: Path) -> None:
    """As gpt-oss' template: it shows the first call of a message, and takes thoughts or content with it."""
    template = Templated(
        embedded_folder,
        "{{ tools }}{% for message in messages %}{% if message.tool_calls %}"
        "{% if message.content and message.thinking %}{{ raise_exception('both') }}{% endif %}"
        "[{{ message.thinking }}]{{ message.tool_calls[0].function.name }}<|channel|>commentary"
        "{% else %}{{ message.role[0] }}:{{ message.content }}{% endif %} {% endfor %}",
    )
    assert template.render(HISTORY).endswith("u:Hi [Hm.]f0<|channel|>commentary t:r0 []f1<|channel|>commentary t:r1 ")
    spoken = [HISTORY[0], HISTORY[1] | {"content": "I look."}, *HISTORY[2:]]
    assert "[Hm.\n\nI look.]f0" in template.render(spoken)


def test_harmony_has_descriptions(embedded_folder: Path) -> None:
    source = (
        "{% for tool in tools %}{{ '// ' + tool.function.description }}{% endfor %}<|channel|>{{ messages[0].content }}"
    )
    tool = {"type": "function", "function": {"name": "f", "description": None}}
    for given in (tool, {"type": "function", "function": {"name": "f"}}):
        assert Templated(embedded_folder, source).render([USER], tools=[given]).startswith("// ")


def test_gemma_4_has_no_content_in_messages_with_calls(embedded_folder: Path) -> None:
    template = Templated(
        embedded_folder,
        "{{ tools }}<|tool_call>{% for m in messages %}{% if m.tool_calls %}[{{ m.reasoning_content }}]{% endif %}"
        "{{ m.content }}{% endfor %}",
    )
    spoken = [HISTORY[0], HISTORY[1] | {"content": "I look."}, *HISTORY[2:]]
    assert template.render(spoken).endswith("Hi[Hm.\n\nI look.]r0r1")


EFFORT = (
    "{% set e = reasoning_effort if reasoning_effort is defined else 'xhigh' %}{{ messages[0].content }}"
    "{% if e not in ('low', 'medium', 'xhigh') %}{{ raise_exception('no effort') }}{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (EFFORT, {"none": "low", "minimal": "low", "low": "low", "high": "medium", "max": "xhigh"}),
        (EFFORT + "{{ enable_thinking }}", {"none": None, "minimal": "low", "xhigh": "xhigh", "max": "xhigh"}),
        (
            "{{ messages[0].content }}<|channel|>{{ reasoning_effort }}",
            {"none": "low", "medium": "medium", "max": "high"},
        ),
        ("{{ messages[0].content }}{{ reasoning_effort }}", {"none": "none", "minimal": "minimal", "max": "max"}),
        ("{{ messages[0].content }}", {"high": None}),
    ],
)
def test_efforts_are_those_that_the_template_takes(
    embedded_folder: Path, source: str, expected: dict[Effort, str | None]
) -> None:
    """Qwen3.8's has both variables, and refuses efforts that it does not know."""
    template = Templated(embedded_folder, source)
    for effort, told in expected.items():
        found = template.effort_variables(effort)
        assert found.get("reasoning_effort") == told
        assert found.get("enable_thinking") == (effort != "none" if "enable_thinking" in source else None)


def test_lfm2_shows_calls_that_its_template_does_not_look_at(embedded_folder: Path) -> None:
    template = Templated(
        embedded_folder,
        "<|tool_list_start|>{{ tools }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}",
    )
    call = '(a="x", b=[True, None])'
    assert f"a:<|tool_call_start|>[f0{call}, f1{call}]<|tool_call_end|> t:r0 " in template.render(HISTORY)


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("{{ tools }}<tool_call>\n<function=f>\n<parameter=a>\n", "xml"),
        ("{{ tools }}<tool_call>f\n<arg_key>", "glm"),
        ("{{ tools }}<tool_call>{", "hermes"),
        ("{{ tools }}<seed:tool_call>\n<function=f>\n<parameter=a>", "seed"),
        ('{{ tools }}<minimax:tool_call>\n<invoke name="f">', "minimax"),
        ("{{ tools }}<TOOLCALL>[{", "nemotron"),
        ("{{ tools }}<|tool_call|>{}<|/tool_call|>", "phi"),
        ("{{ tools }}respond only with <|tool_call|> followed by a JSON list", "granite"),
        ("{{ tools }}<|tool_call_start|>[", "lfm2"),
        ("{{ tools }}<|tool_call>call:", "gemma4"),
        ("{{ tools }}<|START_ACTION|>[", "cohere"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>\n```json", "deepseek_r1"),
        ("{{ tools }}<|tools_prefix|>", "apertus"),
        ("{{ messages }}", "generic"),
    ],
)
def test_families_by_their_templates(source: str, family: str) -> None:
    assert Dialect.of(source, []).family == family


@pytest.mark.parametrize(
    ("condition", "switches"),
    [
        ("{%- if not thinking is defined -%}{%- set thinking = false -%}{%- endif -%}", True),  # DeepSeek V3.1
        ("{% if tools %}{%- elif thinking %}{% endif %}", True),  # Granite 3
        ("{% for m in messages %}{% if m.thinking %}{% endif %}{% if 'thinking' in m %}{% endif %}{% endfor %}", False),
        ("When thinking, think.", False),
    ],
)
def test_thinking_is_switched_by_its_variable(embedded_folder: Path, condition: str, switches: bool) -> None:
    template = Templated(embedded_folder, condition + "{{ messages[0].content }}")
    assert template.effort_variables("high") == ({"thinking": True} if switches else {})
    assert template.effort_variables("none") == ({"thinking": False} if switches else {})
