"""The router: it owns every request and its text, admits, places, dispatches and replays, and never touches a tensor.

The way of one request, in fourteen files. Down:

    api/generation_servicer.py    translate from gRPC, find the tenant
    service_directory.py          find the model's service by name, or by one that stands for several (traffic.py)
    service.py                    one model's requests: check parameters (validation.py), take permits, make text and
                                  tokens of the prompt (text/input_processor.py), start a task for each choice
    dispatch.py                   one choice: queue, attempt, and after a failure replay
    admission/queue.py            wait in order until admission/placement.py finds workers
    attempt.py                    one attempt: the stream from the decode worker (workers/decode_link.py), the call to
                                  the prefill worker (workers/prefill_client.py)

Back up, for each token:

    choice.py                     tokens in order, text (text/text_stream.py), finish reason
    answer_stream.py              choices merged into one stream of messages to the client

Beside it:

    workers/                                  which workers there are, and which are healthy
    timeline.py, journal.py, history.py       record what happened; api/operators.py and metrics.py show it
    tenants.py                                the callers
    readiness.py                              whether the models can be served
    served_model.py                           name, facts, tokenizer and limits of a model
    advice.py, role_switching.py              advice to add, remove and switch workers, and switches by it
    model_router.py                           puts the parts of one model together
    garbage.py                                when Python collects garbage
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
