"""Admission of requests: concurrency limits, the queue, and forecasts of waiting times."""
