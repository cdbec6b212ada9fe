"""Code that prefill and decode workers share.

worker.py                 composition of a worker process: engine, metrics, registration
engine_host.py            builds the engine from the settings; load_watch.py limits the time that it takes
runtime.py                listen, register, serve, drain, stop; reports of the engine, and detection of a stuck one
agent.py, redis_agent.py  registration and heartbeats, with one router or through Redis; the Worker gRPC service
settings.py               settings of both kinds of worker
metrics.py                figures of the engine (both roles), of sent KV (prefill) and of started sequences (decode)
tracing.py                spans of both roles

Several ranks of a worker:

rank_watch.py             state and CPU time of ranks on this machine
rank_listener.py          the server into which ranks without shared memory dial, made by rank_server.py
rank_link.py              one rank's connection to it
rank_protocol.py          facts on which a worker and such ranks must agree
local_ranks.py            the processes of such ranks on this machine, as on its GPUs
"""
