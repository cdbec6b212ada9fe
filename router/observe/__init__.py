"""Observability for operators: journal, timelines, metrics and traces."""
