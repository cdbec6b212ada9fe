"""The HTTP gateway: serves clients of OpenAI, Anthropic, LMI (DJLServing), SageMaker and TGI unmodified. It calls the
router through the SDK.

The way of one request:
    1. server.py                   uvicorn accepts the connection; limits on connections, headers and slow readers, and
                                   TLS, in connections.py
    2. app.py                      check of the Host header, CORS, and the route; each route with a key is an Endpoint,
                                   and pages, health checks and metrics are functions of web.py
    3. exchange.py                 Endpoint: request id, span, metrics and access log around the steps 4 to 9
    4. access.py                   origin and API key; the router decides which keys are valid (401, 403)
    5. exchange.py                 body read up to its limit (413, 408), then a slot taken (429); backend.py counts both
    6. openai/ responses/          JSON to a checked body (schema.py, requests.py), body to SDK arguments
       anthropic/ lmi/ tgi/        (SageMaker's API is lmi/sagemaker.py; batches/ sends each line of a file this way)
    7. feed.py                     one SDK call per prompt; token events of all calls merged into one feed
    8. answers.py                  without streaming: events collected into choices, then rendered as one JSON body
    9. answers.py                  with streaming: each event rendered and framed as SSE or JSON lines
   10. errors.py                   an error in any step becomes the dialect's status and body
A client that disconnects cancels its SDK calls at any step (cancel_on_disconnect in server.py).
"""

from mesh.interrupts import end_imports_quietly

end_imports_quietly()
