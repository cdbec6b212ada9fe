"""Rows of logits: masks, log-probabilities, random tokens."""
