"""Admission: permits, the queue, forecasts of waiting times, and the placement of attempts on workers."""
