"""Admission: permits, the queue, forecasts of waiting times, and the placement of attempts on workers.

limiter.py      permits: caps of choices in service; shared_limiter.py, permit_leases.py: over Redis
queue.py        attempts that wait for capacity; fair_queue.py: their order
forecast.py     predicted waiting times, and when to try again
placement.py    the choice of workers, over roster.py (workers as columns) and prefix_chain.py (cached prefixes)
in_flight.py    the work that this router has at each worker
"""
