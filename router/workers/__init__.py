"""The workers as the router sees them.

coordination.py       the registry: heartbeats over gRPC, or over Redis (redis_registry.py), which feed membership.py
membership.py         the table of workers; mesh_view.py: the part of it that one model may use
connections.py        channels to workers
health.py, canary.py  which workers are proven: canaries, circuit breakers
decode_link.py        the stream to a decode worker; prefill_client.py: the call to a prefill worker
"""
