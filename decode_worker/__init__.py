"""Receives KV and runs the continuous batch; prefills short prompts itself."""
