"""Batches: files of requests in OpenAI's format, answered with capacity that nobody else uses."""
