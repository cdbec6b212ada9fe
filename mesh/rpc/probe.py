"""Is a service ready? `python -m mesh.rpc.probe HOST:PORT` exits 0 if its health says SERVING: for container health
checks.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_TIMEOUT_S = 3.0


def main(argv: list[str]) -> int:
    """Ask once."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m mesh.rpc.probe HOST:PORT\n")
        return 2
    with grpc.insecure_channel(argv[0]) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{argv[0]}: {error.code().name}\n")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
