"""From the model's text to parts of an answer: reasoning, however the text is cut into pieces; blocks of each kind."""

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.anthropic.messages import MessageEvents
from gateway.anthropic.requests import MessagesBody, chat_of
from gateway.openai.answer_parser import AnswerFormat, AnswerParser
from gateway.openai.chat import build_message
from gateway.openai.reasoning import REASONING_FORMATS, ReasoningParser
from gateway.openai.requests import ChatBody, ClientFieldNames
from gateway.openai.responses.requests import ResponsesBody
from gateway.openai.responses.requests import chat_of as chat_of_response
from gateway.openai.tool_choice import Function, ToolUse
from gateway.openai.tool_parser import TOOL_FORMATS
from gateway.schema import check
from tandem import FinishReason, Token, TokenEvent, Usage

NAMES = ClientFieldNames({}, frozenset())
CASES = [
    (False, "<think>\nLet me see.\n</think>\n\nIt is 5.", ("Let me see.", "It is 5.")),
    (False, "<think>a < b </thin k></think>c", ("a < b </thin k>", "c")),
    (False, "<think>\n\n</think>\n\nHi", (None, "Hi")),
    (False, "Hi <think>there</think>", (None, "Hi <think>there</think>")),
    (False, "  Hi ", (None, "  Hi ")),
    (False, "<thin", (None, "<thin")),
    (False, "", (None, "")),
    (False, "<think>still at it ", ("still at it", None)),
    (False, "<think>", (None, "")),
    (False, "<think><think>x", ("<think>x", None)),
    (False, "<think> <think", ("<think", None)),
    (True, "Let me see.\n</think>\n\n 5 \n", ("Let me see.", "5 \n")),
    (True, "<think>\nLet me see.</think>5", ("Let me see.", "5")),
    (True, "<think><think>x</think>5", ("<think>x", "5")),
    (True, "  <thi", ("<thi", None)),
    (True, "cut </thi", ("cut </thi", None)),
]
PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "x", "yz"]), max_size=14)


def message(texts: list[str], reason: FinishReason, *, stops: tuple[str, ...] = (), tools: bool = False) -> Any:
    """The message that a stream builds; it must be the same as the one that the events add up to."""
    use = ToolUse((Function(name="add"),), TOOL_FORMATS["hermes"]) if tools else None
    renderer = MessageEvents("m", AnswerFormat(use, "none"), stops, NAMES)
    events: list[Any] = []
    for number, text in enumerate(texts):
        is_last = number == len(texts) - 1
        usage = Usage(prompt_tokens=9, completion_tokens=len(texts), cached_tokens=4) if is_last else None
        prompt = 9 if number == 0 else 0
        event = TokenEvent(0, Token(1, text), "id", reason if is_last else None, usage, num_prompt_tokens=prompt)
        events += renderer.event(event)
    assert events[0]["message"]["usage"]["input_tokens"] == 9
    whole = renderer.message()
    assert events[-1]["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    streamed = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert streamed == "".join(block.get("text", "") for block in whole["content"])
    return whole


@pytest.mark.parametrize(
    ("texts", "stops", "text", "matched"),
    [
        (["1 2", " 3 END"], ("END",), "1 2 3 ", "END"),
        (["1 2", " 3 END"], ("ND", "END", "X"), "1 2 3 ", "END"),
        (["END"], ("END",), "", "END"),
    ],
)
def test_the_stop_sequence_is_named_and_cut_off(texts: list[str], stops: Any, text: str, matched: str) -> None:
    answer = message(texts, FinishReason.STOP_SEQUENCE, stops=stops)
    assert "".join(block["text"] for block in answer["content"]) == text
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", matched)


def test_a_stop_string_of_the_model_ends_the_turn() -> None:
    """It is in no request, and the router has cut it off."""
    answer = message(["1 2", " 3 "], FinishReason.STOP_SEQUENCE)
    assert [block["text"] for block in answer["content"]] == ["1 2 3 "]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)


def test_cached_tokens_are_counted_apart() -> None:
    answer = message(["a", "b"], FinishReason.EOS_TOKEN)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (5, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "parsed"), [('{"a": 1, "b": [2, 3', {"a": 1, "b": [2, 3]}), ("{", {}), ('{"a": 1}}', {"a": 1})]
)
def test_a_call_that_is_cut_off_has_what_is_there(arguments: str, parsed: Any) -> None:
    texts = ["So: ", f'<tool_call>{{"name": "add", "arguments": {arguments}']
    answer = message(texts, FinishReason.LENGTH, tools=True)
    assert answer["stop_reason"] == "max_tokens"
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
    assert answer["content"][1]["input"] == parsed


def test_results_and_texts_of_one_turn_are_messages_of_their_own() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "a", "content": "1"},
        {"type": "tool_result", "tool_use_id": "b"},
        {"type": "text", "text": "So?"},
        {"type": "text", "text": "Go on."},
    ]
    body = check(MessagesBody, {"max_tokens": 1, "messages": [{"role": "user", "content": content}]})
    chat = check(ChatBody, chat_of(body))
    assert [(turn.role, turn.tool_call_id, turn.content) for turn in chat.messages] == [
        ("tool", "a", "1"),
        ("tool", "b", ""),
        ("user", None, "So?\nGo on."),
    ]


def test_items_of_one_turn_are_one_message() -> None:
    call = {"type": "function_call", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": "I look."},
        call | {"call_id": "1"},
        call | {"call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "a"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": "Done."},
        {"role": "assistant", "content": "Really."},
    ]
    chat = check(ChatBody, chat_of_response(check(ResponsesBody, {"input": items, "instructions": "Be brief."})))
    assert [turn.role for turn in chat.messages] == [
        *("system", "user", "assistant", "tool", "tool", "assistant", "assistant")
    ]
    turn = chat.messages[2]
    assert (turn.reasoning_content, turn.content) == ("hm", "I look.")
    assert [each["id"] for each in turn.tool_calls or ()] == ["1", "2"]


def read(begins_within: bool, pieces: list[str], name: str = "qwen3") -> tuple[str | None, str | None]:
    parser = AnswerParser(None, ReasoningParser(REASONING_FORMATS[name], begins_within=begins_within))
    parts = [piece for text in pieces for piece in parser.push(text)]
    message = build_message([*parts, *parser.finish(FinishReason.LENGTH)])
    return message.get("reasoning_content"), message["content"]


@pytest.mark.parametrize(("begins_within", "text", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_reasoning(begins_within: bool, text: str, expected: tuple[str | None, str | None], size: int) -> None:
    assert read(begins_within, [text[at : at + size] for at in range(0, len(text), size)]) == expected


MARKED = [
    ("mistral", "[THINK]Let me see.[/THINK]5", ("Let me see.", "5")),
    ("mistral", "<think>x[/THINK]</think>5", ("x[/THINK]", "5")),
    ("mistral", "It is [5].", (None, "It is [5].")),
    (
        "seed_oss",
        "<seed:think>\n<seed:cot_budget_reflect>I have used 9 tokens.</seed:cot_budget_reflect>\nx\n</seed:think>5",
        ("<seed:cot_budget_reflect>I have used 9 tokens.</seed:cot_budget_reflect>\nx", "5"),
    ),
    (
        "cohere_command3",
        "<|START_THINKING|>x<|END_THINKING|><|START_RESPONSE|>5 < 6 <|END_RESPONSE|>",
        ("x", "5 < 6"),
    ),
    ("cohere_command4", "<|START_TEXT|>5<|END_TEXT|>", (None, "5")),
    ("cohere_command3", "<|START_THINKING|>x<|END_THINKING|><|START_ACTION|>[", ("x", "<|START_ACTION|>[")),
    (
        "hunyuan_a13b",
        "<think>\nx\n</think>\n<answer>\n5\n\n6 </answer> </an\n</answer>\n",
        ("x", "5\n\n6 </answer> </an"),
    ),
    ("hunyuan_a13b", " Hi <answer>", (None, " Hi <answer>")),
    ("kimi_k2", "<think>x\n<|tool_calls_section_begin|>", ("x", "<|tool_calls_section_begin|>")),
    ("minimax_m2", "<think>x</think>\n\n5", ("x", "5")),
    ("gemma4", "<|channel>thought\nx\n<channel|>5", ("x", "5")),
    ("gemma4", "<|channel>thought\n<channel|>5", (None, "5")),
    ("gemma4", "<|channel>thought\nx<|tool_call>call:", ("x", "<|tool_call>call:")),
    ("apertus", "<|inner_prefix|>x<|inner_suffix|>5", ("x", "5")),
]


@pytest.mark.parametrize(("name", "text", "expected"), MARKED)
def test_reasoning_between_other_marks(name: str, text: str, expected: tuple[str | None, str | None]) -> None:
    for size in (1, 2, 3, 7, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(False, pieces, name) == expected


def split(begins_within: bool, text: str) -> tuple[str | None, str | None]:
    """What the reader finds in a whole text."""
    first = text.lstrip()
    if not begins_within and not first.startswith("<think>"):
        return None, text
    reasoning, _, content = first.removeprefix("<think>").partition("</think>")
    return reasoning.strip() or None, content.lstrip() or (None if reasoning.strip() else "")


@given(pieces=PIECES, begins_within=st.booleans())
@example(pieces=["<think>", "<", "think", ">"], begins_within=False)
@example(pieces=["<think>", "<", "think", ">"], begins_within=True)
@example(pieces=["<think>", "<", "</think>", "think", ">"], begins_within=False)
def test_chunking_does_not_change_the_result_and_no_text_is_lost(pieces: list[str], begins_within: bool) -> None:
    text = "".join(pieces)
    assert read(begins_within, [text]) == read(begins_within, pieces) == split(begins_within, text)
