"""Code that every service shares. Nothing here imports a service, the engine or torch.

domain/                  requests, tokens, KV shapes, workers, hosts, errors: no I/O
wire.py, durations.py    domain values, and seconds, to and from protobuf messages
rpc/                     gRPC servers, channels, credentials, error statuses, health checks
redis_connection.py      connections, key names and messages of the Redis registry
signed_messages.py       those messages, signed with the mesh key
settings.py              settings from flags, environment and a TOML file; setting_checks.py: checks of their values
public_tls.py            the certificate that clients see
certificates.py          checks of certificate files; certificate_expiry.py: warnings of those that expire in use
process.py               start, signals and stop of a service process; secrets for a child; exit when the loop is stuck
process_limits.py        the system's limits on open files and address space
interrupts.py            Ctrl-C, SIGTERM and a closed terminal in programs that people run by hand
parent.py                the end of a process with its parent
fork_server/             a process that has imported the services' modules and forks the services
logs.py, line_writer.py  logs
metrics.py, tracing.py   Prometheus metrics and OpenTelemetry traces
tasks.py                 asyncio: delays between attempts, cancellation, tasks that fail as one
atomic_file.py           files that are replaced atomically
v1/                      generated from protos/mesh/v1
"""

import os

# gRPC's core reads this when it is imported. What it says below errors would stand between a log's lines of JSON.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
