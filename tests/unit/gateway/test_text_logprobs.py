"""The log-probs of a response: each text has those of the tokens that hold it, and no others."""

from collections.abc import Sequence

import pytest

from gateway.openai.answer_parser import AnswerFormat, BlockAdded, BlockParser
from gateway.openai.requests import ChatBody
from gateway.openai.responses.logprobs import TextLogprobs
from gateway.openai.tagged_formats import TAGGED_FORMATS
from gateway.openai.tool_choice import Function, ToolUse
from gateway.openai.tool_parser import TOOL_FORMATS
from tandem import FinishReason, Token, TokenEvent, Usage

PLAIN = AnswerFormat(None, "none")
REASONING = AnswerFormat(None, "qwen3")
HERMES = ToolUse((Function(name="f"),), TOOL_FORMATS["hermes"])
HARMONY = AnswerFormat(None, "openai_gptoss", is_harmony=True)
TAGGED = ToolUse((Function(name="f"),), TAGGED_FORMATS["qwen3_coder"])
CALL = [b"<tool_call>", b'{"name": "f", "arguments": {}}', b"</tool_call>"]
SMILE = "😀".encode()
NEXT = (b"<|end|>", b"<|start|>", b"assistant")


def said(channel: bytes, *body: bytes) -> list[bytes]:
    """A message in harmony."""
    return [b"<|channel|>", channel, b"<|message|>", *body]


def texts_of(answer_format: AnswerFormat, pieces: Sequence[bytes], held: Sequence[int]) -> list[tuple[str, str]]:
    """Each text of an answer, and the text of the tokens that it has log-probs of. The router holds back the texts of
    tokens `held`, and of those that end within a character."""
    logprobs = TextLogprobs(ChatBody(messages=[{"role": "user", "content": "x"}], logprobs=True))
    parser = BlockParser(answer_format)
    waiting = b""
    for number, piece in enumerate(pieces):
        waiting += piece
        text = waiting.decode("utf-8", "ignore")
        text, waiting = ("", waiting) if number in held or text.encode() != waiting else (text, b"")
        reason = FinishReason.LENGTH if number == len(pieces) - 1 else None
        token = Token(number, text, -1.0, own_bytes=piece)
        event = TokenEvent(0, token, "r", reason, Usage(1, len(pieces)) if reason else None)
        logprobs.begin_event(event)
        for step in parser.read(event, event.text):
            if isinstance(step, BlockAdded):
                logprobs.of_step(step)
    return [
        (block.text, b"".join(bytes(entry["bytes"]) for entry in logprobs.of_block(block)).decode())
        for block in parser.blocks
        if block.kind == "text"
    ]


@pytest.mark.parametrize(
    ("answer_format", "pieces", "held", "expected"),
    [
        # Characters of several tokens
        (PLAIN, [SMILE[:1], SMILE[1:3], SMILE[3:], b" x"], [], ["😀 x"]),
        (PLAIN, [b"x " + SMILE[:1], SMILE[1:] + b"y"], [], ["x 😀y"]),
        (REASONING, [b"<think>", b"m", b"</think>", SMILE[:2], SMILE[2:]], [], ["😀"]),
        # Texts that may have been stop strings
        (PLAIN, [b"a", b"b", b" c", b"d"], [0, 1], ["ab cd"]),
        (REASONING, [b"<think>", b"m", b"</think>", b"a", b"b", b"c"], [2, 3, 4], ["abc"]),
        (REASONING, [b"<think>", b"m", b".", b"</think>", b"a", b"b"], [2, 3, 4], ["ab"]),
        (AnswerFormat(HERMES, "none"), [b"I", b" look", b" <", b"b"], [0, 1], ["I look <b"]),
        # Texts like the beginning of a mark, which may follow
        (AnswerFormat(HERMES, "none"), [b"a", b"<", b"<", b"b"], [], ["a<<b"]),
        (AnswerFormat(HERMES, "none"), [b"a", b"<", b"<", b"<", b"b"], [2], ["a<<<b"]),
        (REASONING, [b"<think>", b"a", b"</think>", b"a", b"b"], [1, 2], ["ab"]),
        # Texts like the beginning of the mark behind them
        (AnswerFormat(HERMES, "none"), [b"<", *CALL], [], ["<"]),
        (AnswerFormat(HERMES, "none"), [b"<", *CALL], [0], ["<"]),
        (AnswerFormat(HERMES, "none"), [b"<", b"tool", b"<", b"tool_call>", *CALL[1:]], [], ["<tool"]),
        (AnswerFormat(HERMES, "qwen3"), [b"<think>", b"m", b"</think>", b"<", *CALL], [], ["<"]),
        (AnswerFormat(HERMES, "none"), [*CALL, b"<", *CALL], [], ["<"]),
        (AnswerFormat(TAGGED, "none"), [b"<", b"<function=f>", b"</function>", b"</tool_call>"], [], ["<"]),
        (AnswerFormat(None, "hunyuan_a13b"), [b"<answer>", b"<", b"</answer>"], [], ["<"]),
        (AnswerFormat(None, "hunyuan_a13b"), [b"<answer>", b"<", b"</answer>", b" ", b"\n"], [], ["<"]),
        (HARMONY, [*said(b"final", b"<"), b"<|end|>"], [], ["<"]),
        (HARMONY, [*said(b"final", b"<", b"|"), b"<|return|>"], [], ["<|"]),
        (HARMONY, [*said(b"final", b"<"), *NEXT, *said(b"final", b"|", b"C")], [], ["<\n|C"]),
        # Marks between messages of one kind, and between messages of several
        (HARMONY, [*said(b"final", b"A"), *NEXT, *said(b"final", b"B", b"C")], [], ["A\nBC"]),
        (
            HARMONY,
            [*said(b"commentary", b"A"), *NEXT, *said(b"analysis", b"B"), *NEXT, *said(b"final", b"C", b"D")],
            [],
            ["A", "\nCD"],
        ),
    ],
)
def test_texts_have_the_log_probs_of_their_tokens(
    answer_format: AnswerFormat, pieces: list[bytes], held: list[int], expected: list[str]
) -> None:
    texts = texts_of(answer_format, pieces, held)
    assert [text for text, _ in texts] == expected
    assert [of_tokens for _, of_tokens in texts] == [text.replace("\n", "") for text in expected]
