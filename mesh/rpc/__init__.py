"""gRPC infrastructure of all services.

server.py, channel.py      every server, with its interceptor, and every channel of the mesh
status.py                  errors to and from gRPC statuses
request_reader.py          the limit on the time in which a request must arrive
credentials.py             mesh key and TLS identities; settings.py reads them from the settings
health.py, probe.py        grpc.health.v1 service, and a command for container health checks
"""
