"""Custom handlers: a user's model.py with LMI's contract, in a process of its own next to the gateway.

    gateway ──HTTP over a Unix socket──▶ python -m gateway.handler ──▶ handle(inputs) ──SDK──▶ router

`inputs.py` and `outputs.py` are the classes that handlers use, `user_code.py` loads model.py, and `server.py` calls it.
On the gateway's side, `process.py` starts and restarts the process and forwards requests, and `stdio.py` turns the
output of the process into log lines.
"""
