"""Custom handlers: a user's model.py in a process of its own, beside the gateway under LMI's contract.

    gateway ──HTTP over a Unix socket──▶ python -m gateway.handler ──▶ handle(inputs) ──SDK──▶ router

`inputs.py` and `outputs.py` are what handlers see, `user_code.py` loads them, `server.py` calls them, and `process.py`
is the gateway's side: it starts the process, starts it again when it dies, and passes requests on.
"""
