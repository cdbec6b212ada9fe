"""The Redis registry, through which several routers share workers: connections, key names and signed messages.

With a single router, workers register through a gRPC stream instead (worker/agent.py).
"""
