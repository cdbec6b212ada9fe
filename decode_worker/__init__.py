"""The decode worker: receives KV, generates tokens in a continuous batch, and prefills short prompts itself.

Start reading at service.py.
"""
