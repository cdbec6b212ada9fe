"""Chat templates: what transformers renders, and nothing dangerous."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.domain.errors import ConfigurationError, InvalidRequest
from router.text.chat import ChatMessage, ChatTemplate, Rendering
from tests.defects import Repaired

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
    ("{{ tools is none }} {{ documents is none }}", "True True"),
    ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}", "be <brief>héllohi"),
    ("  {% if true %}\n  kept\n  {% endif %}\n", "  kept\n"),
]


@pytest.mark.parametrize(("source", "rendered"), RENDERED)
def test_renders_as_transformers_does(source: str, rendered: str) -> None:
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(TURNS) == rendered


# As SmolVLM's and LLaVA's have it, as Gemma 3's has it, and one that takes texts only.
_PARTS = (
    "{% for m in messages %}[{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endfor %}"
)
_SELECTED = (
    "{% for m in messages %}[{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}"
    "{% endfor %}{% endfor %}"
)
_FIRST = "{% for m in messages %}[{{ m['content'][0]['text'] }}{% endfor %}"
_EITHER = "{% for m in messages %}{% if m.content is string %}[{{ m.content }}{% else %}parts{% endif %}{% endfor %}"
_TEXTS = "{% for m in messages %}{{ '[' + m.content | trim }}{% endfor %}"


@pytest.mark.parametrize("source", [_PARTS, _SELECTED, _FIRST, _EITHER, _TEXTS])
def test_each_template_gets_contents_as_it_takes_them(source: str) -> None:
    template = ChatTemplate(source, {}, tool_source=_TEXTS)
    assert template.render(TURNS) == "[be <brief>[héllo[hi"
    assert template.render(TURNS, '[{"type": "function"}]') == "[be <brief>[héllo[hi"
    continued = Rendering(adds_generation_prompt=False, continues_final=True)
    assert template.render([*TURNS[:2], ChatMessage("assistant", "")], "", continued) == "[be <brief>[héllo["


def test_templates_see_tools_and_all_members_of_a_turn() -> None:
    source = "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ messages[0].tool_calls[0].id }}"
    turn = ChatMessage("assistant", "", '{"tool_calls": [{"id": "7"}], "role": "system"}')
    assert ChatTemplate(source, {}).render([turn], '[{"function": {"name": "add"}}]') == "add;7"
    assert ChatTemplate("{{ messages[0].role }}", {}).render([turn]) == "assistant", "which a client cannot replace"


# As Mistral's templates have it.
_NINE = (
    "{% for m in messages %}{% for call in m.tool_calls or [] %}{% if call.id is not defined or call.id|length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ call.id }};"
    "{% endfor %}{% if m.role == 'tool' %}{% if m.tool_call_id|length != 9 %}{{ raise_exception('length') }}{% endif %}"
    "{{ m.tool_call_id }};{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("id_", "shown"),
    [("A23456789", "A23456789"), ("call_abcdefGHI123", "defGHI123"), ("chat-tool-1", "chattool1"), ("7", "000000007")],
)
def test_ids_of_calls_from_other_servers_have_the_length_that_a_template_wants(
    id_: str, shown: str, repaired: Repaired
) -> None:
    call = ChatMessage("assistant", "", json.dumps({"tool_calls": [{"id": id_, "function": {"name": "f"}}]}))
    answer = ChatMessage("tool", "x", json.dumps({"tool_call_id": id_}))
    assert ChatTemplate(_NINE, {}).render([call, answer]) == f"{shown};" * 2
    free = "{{ messages[0].tool_calls[0].id }}"
    assert ChatTemplate(free, {}).render([call, answer]) == id_
    repaired("F18", "ids of calls have the length that the template wants")


@pytest.mark.parametrize("text", ["{", "3", "[" * 100_000])
def test_tools_that_are_no_json_are_refused(text: str) -> None:
    for messages, tools in ([ChatMessage("user", "", text)], ""), (TURNS, text):
        with pytest.raises(InvalidRequest):
            ChatTemplate("", {}).render(messages, tools)


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


def test_the_text_is_bounded() -> None:
    with pytest.raises(InvalidRequest, match="too big"):
        ChatTemplate("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", {}).render(TURNS)


def test_a_broken_template_is_the_operators_error() -> None:
    with pytest.raises(ConfigurationError, match="template is broken"):
        ChatTemplate("{% for %}", {})


def test_broken_files_of_templates_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=f"{tmp_path}: the chat template is broken"):
        ChatTemplate.load(write_config(tmp_path, chat_template="{% for %}"))
    with pytest.raises(
        ConfigurationError, match=r"tokenizer_config\.json: chat_template must be a text or a list, got 3"
    ):
        ChatTemplate.load(write_config(tmp_path, chat_template=3))


def write_config(folder: Path, **content: object) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    return folder


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(TURNS) == "of a processor"
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
    assert template.render(TURNS, '[{"type": "function"}]') == "t"
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<other>", "bos_token": "<first>"}')
    write_config(tmp_path, eos_token="</s>", chat_template="{{ bos_token }}{{ eos_token }}{{ tools | tojson }}")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(TURNS, '[{"a": 1}]') == '<first></s>[{"a": 1}]'
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert template.render(TURNS) == "file"
    (tmp_path / "additional_chat_templates").mkdir()  # where transformers saves those that are not the default
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    template = ChatTemplate.load(tmp_path)
    assert template is not None
    assert (template.render(TURNS), template.render(TURNS, '[{"type": "function"}]')) == ("file", "tools")


@pytest.mark.parametrize("token", [{}, {"content": None}, {"content": 3}, 3, [], None])
def test_a_special_token_without_text_is_none(tmp_path: Path, token: object) -> None:
    template = ChatTemplate.load(write_config(tmp_path, bos_token=token, chat_template="[{{ bos_token }}]"))
    assert template is not None
    assert template.render(TURNS) == "[]"


PHI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}{{ '<|system|>' + "
    "message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' }}{% else %}{{ '<|' + message['role'] + '|>' + "
    "message['content'] }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + name }}{{ '<arg_key>' }}", "glm45"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}", "deepseek_v3"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '<|python_tag|>' }}", "llama3_json"),
        (
            "{{ '{\"name\": \"' + call.name + '\", ' }}{{ '\"parameters\": ' }}{{ 'ipython<|end_header_id|>' }}",
            "llama3_json",
        ),
        (PHI, "phi4_mini_json"),
        ("{{ '<|tool_call|>' }}", "granite"),
        ("{{ '<|tool_calls_section_begin|>' }}", "kimi_k2"),
        ("{%- set begin = '<minimax:tool_call>' -%}", "minimax_m2"),
        ("{%- set begin = '<seed:tool_call>' -%}{{ '<function=' }}", "seed_oss"),
        ("{{ '<|START_ACTION|>[' }}", "cohere_command3"),
        ("{{ '<|tools_prefix|>[' }}", "apertus"),
        ("{{ '<|tool_call>call:' }}", "gemma4"),
        ("{{ '<function_calls>' }}", "olmo3"),
        ("{{ '<tool_calls>[' }}", "hunyuan_a13b"),
        ('{%- set prompt = prompt + "List of tools: [" -%}', "lfm2"),
        ("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "openai"),
        ("{{ messages }}", ""),
    ],
)
def test_templates_tell_how_calls_are_written(source: str, expected: str) -> None:
    assert ChatTemplate(source, {}).tool_call_format == expected


def test_a_template_that_calls_reasoning_thinking() -> None:
    source = (
        "{% for m in messages %}<|start|>{{ m.role }}<|channel|>{{ m.thinking }}<|message|>{{ m.content }}{% endfor %}"
    )
    calls = ', "tool_calls": [{"function": {"name": "f"}}]'
    turns = [ChatMessage("assistant", text, f'{{"reasoning_content": "Hm."{calls}}}') for text in ("", "I look.")]
    thought = ChatMessage("assistant", "3", '{"reasoning_content": "Hm."}')
    shown = ChatTemplate(source, {}).render([thought, ChatMessage("user", "4?"), *turns])
    assert shown.split("<|start|>")[1:] == [
        "assistant<|channel|>Hm.<|message|>3",
        "user<|channel|><|message|>4?",
        "assistant<|channel|>Hm.<|message|>",
        "assistant<|channel|><|message|>Hm.\nI look.",
    ]


def test_a_template_that_calls_reasoning_a_plan() -> None:
    turns = [ChatMessage("assistant", "", '{"reasoning_content": "Hm."}'), ChatMessage("assistant", "5")]
    template = ChatTemplate("{% for message in messages %}[{{message.tool_plan}}]{% endfor %}", {})
    assert template.render(turns) == "[Hm.][]"


def test_a_template_that_takes_tools_in_the_system_message() -> None:
    template, tools = ChatTemplate(PHI, {}), '[{"type": "function", "function": {"name": "für"}}]'
    user = ChatMessage("user", "hi")
    assert template.render([user], tools) == '<|system|><|tool|>[{"name": "für"}]<|/tool|><|user|>hi'
    system = ChatMessage("system", "Be brief.")
    shown = '<|system|>Be brief.<|tool|>[{"name": "für"}]<|/tool|><|user|>hi'
    assert template.render([system, user], tools) == shown
    assert template.render([system, user]) == "<|system|>Be brief.<|user|>hi"


def test_a_template_that_joins_arguments_with_text() -> None:
    """DeepSeek's do: they fail on arguments that are objects."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "für"}}}
    turn = ChatMessage("assistant", "", json.dumps({"tool_calls": [call, {"function": "odd"}]}))
    joins = "{% for t in messages[0].tool_calls[:1] %}{{ t['function']['arguments'] + '.' }}{% endfor %}"
    assert ChatTemplate(joins, {}).render([turn]) == '{"a": "für"}.'
    writes = "{{ messages[0].tool_calls[0]['function']['arguments'] | tojson }}"
    assert ChatTemplate(writes, {}).render([turn]) == '{"a": "für"}'


def test_a_template_that_names_functions_by_ids() -> None:
    """Kimi K2's: the numbers go on through the conversation, and clients have ids of their own."""
    source = (
        "{% for m in messages %}{% for c in m.tool_calls or () %}<|tool_calls_section_begin|>{{ c['id'] }}{% endfor %}"
        "[{{ m.tool_call_id }}]{% endfor %}"
    )

    def turns(*ids: str) -> list[ChatMessage]:
        calls = [{"id": id_, "function": {"name": f"f{id_}", "arguments": {}}} for id_ in ids]
        results = [ChatMessage("tool", "1", json.dumps({"tool_call_id": id_})) for id_ in ids]
        return [ChatMessage("assistant", "", json.dumps({"tool_calls": calls})), *results]

    shown = ChatTemplate(source, {}).render(
        [*turns("a", "b"), *turns("a"), ChatMessage("tool", "1", '{"tool_call_id": "x"}')]
    )
    assert shown.replace("<|tool_calls_section_begin|>", " ") == (
        " functions.fa:0 functions.fb:1[][functions.fa:0][functions.fb:1] functions.fa:2[][functions.fa:2][x]"
    )


R1 = (
    "{% for message in messages %}{% if message['role'] == 'assistant' and message['content'] is none %}"
    "{% for tool in message['tool_calls'] %}{{ tool['function']['name'] + tool['function']['arguments'] + '.' }}"
    "{% endfor %}{% endif %}{% if message['role'] == 'assistant' and message['content'] is not none %}"
    "{% set content = message['content'] %}{{ 'said ' + content }}{% endif %}{% endfor %}"
)


def test_calls_are_shown_by_a_template_that_looks_for_them_where_no_content_is() -> None:
    """As those of DeepSeek R1 and the models that were distilled from it do."""
    calls = json.dumps({"tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]})
    template = ChatTemplate(R1, {})
    assert template.render([ChatMessage("assistant", "", calls)]) == 'f{"a": 1}.'
    assert template.render([ChatMessage("assistant", "I look.", calls)]) == "said I look.", "as in transformers"
    assert template.render([ChatMessage("assistant", "")]) == "said "
    writes = "{{ messages[0].content | tojson }}"
    assert ChatTemplate(writes, {}).render([ChatMessage("assistant", "", calls)]) == '""'


def test_each_template_gets_arguments_as_it_takes_them() -> None:
    """Conversations with tools have a template of their own, which joins texts where the other one does not."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turn = ChatMessage("assistant", "", json.dumps({"tool_calls": [call]}))
    template = ChatTemplate(
        "{{ messages[0].tool_calls[0]['function']['arguments'].a }}",
        {},
        "{{ messages[0].tool_calls[0]['function']['arguments'] + '.' }}",
    )
    assert template.render([turn], '[{"type": "function", "function": {"name": "f"}}]') == '{"a": 1}.'
    assert template.render([turn]) == "1"


def test_a_template_for_tools_tells_before_the_other() -> None:
    assert ChatTemplate("{{ messages }}", {}, "{{ '[TOOL_CALLS]' }}").tool_call_format == "mistral"


SWITCH = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if not loop.last or add_generation_prompt %}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
DEEPSEEK = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}|{% endfor %}A:<think>\n"
TRIMS = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
HI = [ChatMessage("user", "hi")]


def how(text: str = "", **options: Any) -> Rendering:
    return Rendering(text, **options)


def test_a_template_sees_the_clients_values(repaired: Repaired) -> None:
    template = ChatTemplate(SWITCH, {"bos_token": "<s>"})
    assert template.render(HI) == "<|user|>hi<|end|><|assistant|>"
    off = template.render(HI, "", how('{"enable_thinking": false, "documents": [{"a": 1}]}'))
    assert off == "<|user|>hi<|end|><|assistant|><think>\n\n</think>\n\n"
    assert template.render(HI, "", how(adds_generation_prompt=False)) == "<|user|>hi"
    repaired("F6", "chat_template_kwargs reach the template: enable_thinking false closes the reasoning")


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "pad_token", "raise_exception", "range"]
)
def test_values_of_its_own_cannot_be_replaced(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"chat_template_kwargs: {name} cannot be set"):
        ChatTemplate(SWITCH, {"bos_token": "<s>"}).render(HI, "", how(json.dumps({name: "x"})))


@pytest.mark.parametrize(
    "text", ["{", "[]", "3", '{"a b": 1}', '{"a": NaN}', '{"a": Infinity}', '{"a": "' + "x" * 9000 + '"}', "[" * 5000]
)
def test_values_are_plain_json_of_bounded_size(text: str) -> None:
    with pytest.raises(InvalidRequest, match="chat_template_kwargs"):
        ChatTemplate(SWITCH, {}).render(HI, "", how(text))


@pytest.mark.parametrize(
    ("source", "content", "rendered"),
    [
        (SWITCH, "Once ", "<|user|>hi<|end|><|assistant|>Once "),
        (SWITCH, "a a", "<|user|>hi<|end|><|assistant|>a a"),
        (TRIMS, " Once upon ", "[hi][Once upon"),
        (TRIMS, "hi", "[hi][hi"),
    ],
)
def test_the_last_message_is_continued(source: str, content: str, rendered: str, repaired: Repaired) -> None:
    """As transformers 5.23 renders it."""
    turns = [*HI, ChatMessage("assistant", content)]
    template = ChatTemplate(source, {})
    assert template.render(turns, "", how(adds_generation_prompt=False, continues_final=True)) == rendered
    repaired("F6", "continue_final_message ends the prompt behind the last message, as transformers does")


def test_what_cannot_be_continued_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="contradicts"):
        how(continues_final=True)
    with pytest.raises(InvalidRequest, match="does not show"):
        ChatTemplate("hello", {}).render(HI, "", how(adds_generation_prompt=False, continues_final=True))


@pytest.mark.parametrize(
    ("source", "turns", "continues", "expected"),
    [
        (DEEPSEEK, HI, False, True),
        (SWITCH, HI, False, False),
        (SWITCH, [ChatMessage("user", "what is <think> for?")], False, False),
        (SWITCH, [*HI, ChatMessage("assistant", "<think>\nLet me")], True, True),
        (SWITCH, [*HI, ChatMessage("assistant", "<think>\nx</think>\nIt")], True, False),
        ("{{ messages[0].content }}<think>", HI, False, False),
        ("{{ messages[0].content }}{{ '<|im_start|>assistant\\n<think>' }}", HI, False, True),
        ("{{ messages[0].content }}<|END_THINKING|>x<|START_THINKING|>", HI, False, True),
        ("{{ '</seed:think>' }}{{ messages[0].content }}<seed:think><seed:cot_budget_reflect>\n", HI, False, True),
        ("{{ '[/THINK]' }}{{ messages[1].content }}", [*HI, ChatMessage("assistant", "[THINK]Let me")], True, True),
    ],
)
def test_whether_a_prompt_ends_within_reasoning(
    source: str, turns: list[ChatMessage], continues: bool, expected: bool
) -> None:
    template = ChatTemplate(source, {})
    rendering = how(adds_generation_prompt=not continues, continues_final=continues)
    text = template.render(turns, "", rendering)
    assert template.is_in_reasoning(text, turns, rendering) is expected
