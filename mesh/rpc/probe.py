"""A command for container health checks: `python -m mesh.rpc.probe HOST:PORT` exits with 0 if the service reports
SERVING. It reads the service's TLS settings from the environment.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.domain.errors import ConfigurationError
from mesh.public_tls import PublicTlsSettings
from mesh.rpc.channel import NO_PROXY
from mesh.rpc.credentials import TlsIdentity
from mesh.rpc.settings import MemberSettings
from mesh.settings import load_settings

_TIMEOUT_S = 3.0


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(MemberSettings, PublicTlsSettings):
    """The settings of the service that are needed to connect to it."""

    def identities(self) -> Iterator[TlsIdentity | None]:
        """Yield the TLS identities to try, None for plaintext: it is not known which port of the service is probed.
        Raises ConfigurationError."""
        if self.public_tls_cert:
            yield TlsIdentity.load(self.public_tls_cert, self.public_tls_key).for_itself()
        if (tls := self.load_credentials().tls) is not None:
            yield tls.for_itself()
        if not (self.mesh_tls_cert and self.public_tls_cert):
            yield None


def main(argv: list[str]) -> int:
    """Probe once. Return the exit status."""
    if len(argv) != 1:
        sys.stderr.write("usage: python -m mesh.rpc.probe HOST:PORT\n")
        return 2
    try:
        identities = list(load_settings(ProbeSettings, [], prog="probe").values.identities())
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for tls in identities:
        try:
            return 0 if _is_serving(argv[0], tls) else 1
        except grpc.RpcError as error:
            sys.stderr.write(f"{argv[0]}: {error.code().name}\n")
    return 1


def _is_serving(address: str, tls: TlsIdentity | None) -> bool:
    """Query the health service. Raises grpc.RpcError."""
    if tls is None:
        channel = grpc.insecure_channel(address, options=[NO_PROXY])
    else:
        channel = grpc.secure_channel(address, tls.channel_credentials(), options=[NO_PROXY, *tls.channel_options()])
    with channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
