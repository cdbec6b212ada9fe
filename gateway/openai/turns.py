"""Arguments of chat templates: turns of other dialects' conversations, and values for reasoning."""

from collections.abc import Iterable

from gateway.schema import Json

_SYSTEM = ("system", "developer")


def joined_turns(messages: Iterable[Json]) -> list[Json]:
    """Join what the system says at the beginning, and what the user says in a row. The system's words within the
    conversation are said by the user: many templates refuse them or leave them out. Agents send all of these.
    """
    joined: list[Json] = []
    for message in messages:
        role = message["role"]
        if role in _SYSTEM:
            role = "system" if all(each["role"] == "system" for each in joined) else "user"
        if joined and role == joined[-1]["role"] and role in ("system", "user"):
            joined[-1] = {"role": role, "content": f"{joined[-1]['content']}\n{message['content']}"}
        else:
            joined.append({**message, "role": role})
    return joined


def template_values(effort: str | None, own_values: Json | None) -> Json | None:
    """Values for the template, the client's own first. Some templates can only turn reasoning off, others know its
    effort.
    """
    if effort is None:
        return own_values
    is_on = effort != "none"
    values: Json = {"enable_thinking": is_on} | ({"reasoning_effort": effort} if is_on else {})
    return values | (own_values or {})
