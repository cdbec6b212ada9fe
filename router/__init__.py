"""The router: it owns every request and its text, admits, places, dispatches and replays, and never touches a tensor.

The way of one request:

    api/generation_servicer.py    translate from gRPC, find the tenant         model_router.py finds the model by name
    generation/service.py         check parameters (api/validation.py), take permits (admission/limiter.py),
                                  template and tokenize (text/prompts.py), start one task per choice
    generation/dispatch.py        one choice: queue, attempt, and after a failure replay
    admission/queue.py            wait in order (admission/fair_queue.py) until placement/policy.py finds workers
    generation/attempt.py         one attempt: workers/decode_link.py streams from the decode worker,
                                  workers/prefill_call.py calls the prefill worker
    generation/choice.py          tokens in order, text (text/text_stream.py), finish reason
    generation/answer_stream.py   choices merged into one stream of messages to the client

Beside it: workers/ knows which workers there are and which are healthy, observe/ records what happened.
"""
