"""Attention over the paged KV cache: prompts, generated tokens, and the rows that they write."""
