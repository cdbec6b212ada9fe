"""The HTTP front door: OpenAI, LMI and TGI clients, unmodified. A client of the router like any other.

    request ─▶ room? (else overloaded) ─▶ key known to the router? (else 401) ─▶ body, capped ─▶ schema of its dialect
        ─▶ arguments of the SDK ─▶ tandem.AsyncClient ─▶ events ─▶ the dialect's JSON, as one body or as a stream
    the client leaves: the SDK's call is cancelled, wherever the request is

`exchange.py` is that road; `openai/`, `lmi/` and `tgi/` are the dialects.
"""
