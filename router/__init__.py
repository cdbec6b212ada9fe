"""The router: it owns every request and its text, admits, places, dispatches and replays, and never touches a tensor.

The way of one request, in twelve files:

    api/generation_servicer.py    translate from gRPC, find the tenant
    service.py                    find the model by name, check parameters (validation.py), take permits, template
                                  and tokenize (served_model.py), start one task per choice
    dispatch.py                   one choice: queue, attempt, and after a failure replay
    admission/queue.py            wait in order until admission/placement.py finds workers
    attempt.py                    one attempt: workers/decode_link.py streams from the decode worker; the call to the
                                  prefill worker
    choice.py                     tokens in order, text (text/text_stream.py), finish reason
    answer_stream.py              choices merged into one stream of messages to the client

Beside it:

    workers/                                  which workers there are, and which are healthy
    timeline.py, journal.py, history.py       record what happened; api/operators.py and metrics.py show it
    tenants.py                                the callers
    traffic.py                                names that stand for several revisions of a model
    readiness.py                              whether the models can be served
    advice.py, role_switching.py              advice to add, remove and switch workers, and switches by it
    model_router.py                           puts the parts of one model together
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
