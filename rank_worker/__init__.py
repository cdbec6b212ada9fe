"""The process of one rank. It computes what its worker's rank 0, the leader, commands.

serving.py               a rank that the worker starts on its own machine
joining.py, settings.py  a rank that dials in to a worker on another machine
"""
