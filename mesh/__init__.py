"""Code that every service shares. Nothing here imports a service, the engine or torch.

domain/                  requests, tokens, KV shapes, workers, hosts, errors: no I/O
wire.py                  domain values to and from protobuf messages
rpc/                     gRPC servers, channels, credentials, error statuses, health checks
redis_connection.py      connections, key names and messages of the Redis registry
settings.py              settings from flags, environment and a TOML file
process.py               start, signals and stop of a service process; secrets for a child; exit when the loop is stuck
parent.py                the end of a process with its parent
fork_server/             a process that has imported the services' modules and forks the services
logs.py, line_writer.py  logs
metrics.py, tracing.py   Prometheus metrics and OpenTelemetry traces
tasks.py                 asyncio: delays between attempts, cancellation, tasks that fail as one
whole_file.py            files that are replaced as a whole
"""

import os

# gRPC's core reads this when it is imported. What it says below errors would stand between a log's lines of JSON.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
