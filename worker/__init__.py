"""Code that prefill and decode workers share.

worker.py                composition of a worker process: engine, metrics, registration
role.py                  a role: its limits on the engine, and the services over it
runner_settings.py       from the worker's settings to those of its model runner
load_engine.py           builds the engine; load_watch.py limits the time that it takes
role_server.py           a worker in one role: listen, register, serve, drain, stop; reports of the engine
stall_watch.py           detects an engine that is stuck in a step
registration.py          registration and heartbeats, with one router; redis_registration.py: through Redis
servicer.py              the Worker gRPC service: identity and load, draining, change of the role
settings.py              settings of both kinds of worker
metrics.py               figures of the engine (both roles), of sent KV (prefill) and of started sequences (decode)
ranks/                   what a worker with several ranks does beside its engine
"""
