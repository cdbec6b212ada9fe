"""gRPC infrastructure of all services.

server.py, channel.py      every server and every channel of the mesh
interceptor.py, status.py  credentials, errors and the access log of server calls; errors to and from gRPC statuses
credentials.py, tls.py     mesh key and certificates; settings.py reads them from the settings
health.py, probe.py        grpc.health.v1 service, and a command for container health checks
"""
