"""Custom handlers: a user's model.py with LMI's contract, in a process of its own next to the gateway.

    gateway ──HTTP over a Unix socket──▶ python -m gateway.handler ──▶ handle(inputs) ──SDK──▶ router

`djl_python.py` has the classes that handlers use, and `server.py` loads model.py and calls it. On the gateway's side,
`process.py` starts and restarts the process, forwards requests, and turns the process's output into log lines.
"""
