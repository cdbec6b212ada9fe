"""Chat templates: what transformers renders, and nothing dangerous."""

import json
from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError, InvalidRequest
from router.text.chat import ChatMessage, ChatTemplate, parse_extra, parse_tools

TURNS = [ChatMessage("system", "be <brief>"), ChatMessage("user", "héllo"), ChatMessage("assistant", "hi")]

# What transformers 5.23 renders.
RENDERED = [
    (
        "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'user' %}U:{% else %}O:{% endif %}\n{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}",
        "<s>O:be <brief>U:hélloO:hiA:",
    ),
    (
        "{% for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}",
        '{"role": "system", "content": "be <brief>"}{"role": "user", "content": "héllo"}',
    ),
    (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}{% endfor %}"
        "{{ ns.n }}",
        "17",
    ),
    ("{{ messages[:1] | tojson(indent=1) }}", '[\n {\n  "role": "system",\n  "content": "be <brief>"\n }\n]'),
    ("{{ strftime_now('%Y') | length }}", "4"),
    ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "be <brief>héllohi"),
    ("  {% if true %}\n  kept\n  {% endif %}\n", "  kept\n"),
]


@pytest.mark.parametrize(("source", "rendered"), RENDERED)
def test_renders_as_transformers_does(source: str, rendered: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(TURNS) == rendered


def test_templates_see_tools_and_all_members_of_a_turn() -> None:
    source = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ messages[0].tool_calls[0].id }}"
    turn = ChatMessage("assistant", "", parse_extra('{"tool_calls": [{"id": "7"}], "role": "system"}'))
    assert ChatTemplate(source, {}).render([turn], parse_tools('[{"function": {"name": "add"}}]')) == "add;7"
    assert ChatTemplate("{{ messages[0].role }}", {}).render([turn]) == "assistant", "which a client cannot replace"


@pytest.mark.parametrize("text", ["{", "3", "[" * 100_000])
def test_tools_that_are_no_json_are_refused(text: str) -> None:
    for parse in (parse_extra, parse_tools):
        with pytest.raises(InvalidRequest):
            parse(text)


def test_a_template_may_reject_messages() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render(TURNS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages[0].__class__ }}",
        "{{ (''|attr('__class__')) }}",
        "{{ '%s' | format(messages.__class__) }}",
        "{{ '{0.__class__.__init__}'.format(messages) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    try:
        rendered = ChatTemplate(source, {}).render(TURNS)
    except InvalidRequest:
        return
    assert "class" not in rendered
    assert "function" not in rendered


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_rendering_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.text.chat._MAX_RENDER_S", 0.05)
    with pytest.raises(InvalidRequest, match="too big"):
        ChatTemplate(source, {}).render(TURNS)


def test_a_broken_template_is_the_operators_error() -> None:
    with pytest.raises(ConfigurationError, match="template is broken"):
        ChatTemplate("{% for %}", {})


def write_config(folder: Path, **content: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    write_config(
        tmp_path, bos_token="<s>", eos_token={"content": "</s>"}, pad_token=None, chat_template="{{ bos_token }}"
    )
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(TURNS) == "<s>"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "{{ eos_token }}"}]
    write_config(tmp_path, eos_token={"content": "</s>"}, chat_template=named)
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(TURNS) == "</s>"
    assert template.render(TURNS, [{"type": "function"}]) == "t"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<other>", "bos_token": "<first>"}')
    write_config(tmp_path, eos_token="</s>", chat_template="{{ bos_token }}{{ eos_token }}{{ tools | tojson }}")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(TURNS, [{"a": 1}]) == '<first></s>[{"a": 1}]'
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(TURNS) == "file"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' }}", ""),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        ("{{ messages }}", ""),
    ],
)
def test_templates_tell_how_calls_are_written(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).tool_call_format == expected


def test_a_template_for_tools_tells_before_the_other() -> None:
    assert ChatTemplate("{{ messages }}", {}, "{{ '[TOOL_CALLS]' }}").tool_call_format == "mistral"
