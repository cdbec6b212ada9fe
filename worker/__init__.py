"""Code that prefill and decode workers share.

main.py                          composition of a worker process: engine, metrics, registration
engine_host.py, loading.py       build the engine from the settings; model download and loading timeout
runtime.py, stall.py             listen, register, serve, drain, stop; detection of a stuck engine
agent.py, redis_agent.py         registration and heartbeats, with one router or through Redis
reports.py, servicer.py          the engine's load and cache events; the Worker gRPC service
settings.py, metrics.py, malloc.py
"""
