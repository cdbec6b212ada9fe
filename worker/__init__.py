"""Code that prefill and decode workers share.

worker.py                 composition of a worker process: engine, metrics, registration
engine_settings.py        from the worker's settings to those of its engine
engine_host.py            builds the engine; load_watch.py limits the time that it takes
runtime.py                listen, register, serve, drain, stop; reports of the engine, and detection of a stuck one
agent.py, redis_agent.py  registration and heartbeats, with one router or through Redis
servicer.py               the Worker gRPC service: identity and load, draining, change of the role
settings.py               settings of both kinds of worker
metrics.py                figures of the engine (both roles), of sent KV (prefill) and of started sequences (decode)
role.py                   a role: its limits on the engine, and the services over it
ranks/                    what a worker with several ranks does beside its engine
"""
