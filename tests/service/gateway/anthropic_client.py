"""What a user of the anthropic package writes, run with a Python that has it: BASE_URL as argument.

The model answers every turn with reasoning, a text and a call.
"""

import json
import sys
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="x", max_retries=0, timeout=30)
TOOLS: Any = [
    {
        "name": "weather",
        "description": "Weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
ASK: Any = {"model": "fake", "max_tokens": 900, "system": "Be brief.", "tools": TOOLS}
QUESTION: Any = [{"role": "user", "content": "weather?"}]

whole = client.messages.create(messages=QUESTION, **ASK)
with client.messages.stream(messages=QUESTION, **ASK) as stream:
    events = [event.type for event in stream]
    streamed = stream.get_final_message()
call = whole.content[-1]
result: Any = [
    {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "fine"}]},
    {"type": "text", "text": "Go on."},
]
turns: Any = [*QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": result}]
client.messages.create(messages=turns, **ASK)
cut = client.messages.create(messages=QUESTION, **(ASK | {"max_tokens": 12}))
counted = client.messages.count_tokens(messages=QUESTION, model="fake", system="Be brief.")

errors = []
request_ids = [whole._request_id]
for changes in ({"model": "nobody"}, {"extra_body": {"temperature": 9}}, {}, {}):  # the router refuses the last two
    try:
        client.messages.create(messages=QUESTION, **(ASK | changes))
    except anthropic.APIStatusError as error:
        errors.append([error.status_code, error.body["error"]["type"], error.body["error"]["message"]])
        request_ids.append(error.request_id)
try:
    for _ in client.messages.create(messages=QUESTION, stream=True, **ASK):
        pass
except anthropic.APIStatusError as error:
    errors.append([error.body["error"]["type"]])

told = {
    "models": [[model.id, model.display_name, model.type, model.max_input_tokens] for model in client.models.list()],
    "whole": whole.to_dict(),
    "streamed": streamed.to_dict(),
    "events": events,
    "cut": cut.to_dict(),
    "counted": counted.input_tokens,
    "errors": errors,
    "request_ids": request_ids,
}
sys.stdout.write(json.dumps(told))
