"""Code that every service shares. Nothing here imports a service, the engine or torch.

domain/                                   requests, tokens, sampling, KV shapes, workers, errors: no I/O
wire.py, wire_kv.py, list_limits.py       domain values to and from protobuf messages
rpc/                                      gRPC servers, channels, TLS, credentials, error statuses, health checks
registry/                                 messages and connections of the Redis registry
settings.py, settings_file.py             settings from flags, environment and a TOML file
process.py, handover.py                   start, signals and stop of a service process; secrets for a child process
telemetry.py, line_writer.py, log_limit.py   logs
metrics.py, tracing.py                    Prometheus metrics and OpenTelemetry traces
loop_lag.py, loop_watch.py                metrics of the event loop; exit when it is stuck
backoff.py, cancellation.py               retry delays; cancellation of asyncio tasks
"""
