"""Comparison with other CPU engines: installs them, converts the same weights for them, and runs the same load.

A runner (`*_runner.py`) is a process in the environment of a peer that converts weights for it, or serves requests.
`process.py` drives it over stdin and stdout.
"""
