"""Other CPU engines under the same load: how each is installed, given the same weights, and run.

A runner (`*_runner.py`) is a process of a peer's own environment; `process.py` drives it over stdin and stdout.
"""
