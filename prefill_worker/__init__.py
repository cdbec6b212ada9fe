"""Runs prompts and ships their KV to decode workers."""
