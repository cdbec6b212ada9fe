"""Turns of a conversation, as a chat template sees them, in the forms that the templates of some models want."""

import json
import re

_NO_LETTER_OR_DIGIT = re.compile(r"[^A-Za-z0-9]")


def as_parts(content: object) -> object:
    """A text as a list with one part."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def with_tools_in_system(turns: list[dict[str, object]], tools: list[object]) -> list[dict[str, object]]:
    """Give the first turn, a system message, the tools as JSON of bare functions."""
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in tools]
    has_system = bool(turns) and turns[0]["role"] == "system"
    system: dict[str, object] = turns[0] if has_system else {"role": "system", "content": ""}
    text = json.dumps(functions, ensure_ascii=False)
    return [system | {"tools": text}, *(turns[1:] if has_system else turns)]


def with_text_arguments(turn: dict[str, object]) -> dict[str, object]:
    """Give the turn's calls their arguments as JSON text."""
    calls = turn.get("tool_calls")
    if not isinstance(calls, list):
        return turn
    functions = [call.get("function") if isinstance(call, dict) else None for call in calls]
    texts = [
        {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}
        if isinstance(function, dict) and not isinstance(function.get("arguments", ""), str)
        else call
        for call, function in zip(calls, functions, strict=True)
    ]
    return turn | {"tool_calls": texts}


def with_ids_of_length(turn: dict[str, object], length: int) -> dict[str, object]:
    """Give ids of calls this length, of letters and digits: conversations may come from other servers, with longer ids.
    As in vLLM, their ends are kept.
    """

    def fit(owner: dict[str, object], name: str) -> dict[str, object]:
        id_ = owner.get(name)
        if not isinstance(id_, str) or len(id_) == length:
            return owner
        return owner | {name: _NO_LETTER_OR_DIGIT.sub("", id_)[-length:].rjust(length, "0")}

    calls = turn.get("tool_calls")
    if isinstance(calls, list):
        turn = turn | {"tool_calls": [fit(call, "id") if isinstance(call, dict) else call for call in calls]}
    return fit(turn, "tool_call_id")


def with_numbered_ids(turns: list[dict[str, object]]) -> list[dict[str, object]]:
    """Give calls, and their results, the ids `functions.NAME:NUMBER`, numbered through the conversation: the template
    of Kimi K2 shows a call's function by its id only.
    """
    ids: dict[object, str] = {}
    count = 0
    numbered: list[dict[str, object]] = []
    for turn in turns:
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            turn = turn | {"tool_calls": [_numbered(call, ids, number) for number, call in enumerate(calls, count)]}
            count += len(calls)
        id_ = turn.get("tool_call_id")
        numbered.append(turn | {"tool_call_id": ids[id_]} if isinstance(id_, str) and id_ in ids else turn)
    return numbered


def _numbered(call: object, ids: dict[object, str], number: int) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        return call
    new = f"functions.{function.get('name')}:{number}"
    ids[call.get("id") if isinstance(call.get("id"), str) else new] = new
    return call | {"id": new}


def with_reasoning(turn: dict[str, object]) -> dict[str, object]:
    """Show the turn's reasoning also under the names that templates of Command R7B and LFM2.5 have for it."""
    reasoning = turn.get("reasoning_content")
    return {"tool_plan": reasoning, "thinking": reasoning} | turn if isinstance(reasoning, str) else turn


def with_thinking(turn: dict[str, object]) -> dict[str, object]:
    """Call the turn's reasoning `thinking`. A turn with calls has that or a content: gpt-oss's template takes one."""
    thinking = turn.get("reasoning_content") or turn.get("thinking")
    if not isinstance(thinking, str):
        return turn
    if turn.get("tool_calls") and turn["content"]:
        return turn | {"thinking": "", "content": f"{thinking}\n{turn['content']}"}
    return turn | {"thinking": thinking}
