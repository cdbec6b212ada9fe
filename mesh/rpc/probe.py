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
_USAGE = """usage: python -m mesh.rpc.probe HOST:PORT

ask a service whether it is ready; the exit status is 0 if it is SERVING

A service with certificates is asked with them: TANDEM_PUBLIC_TLS_CERT and TANDEM_PUBLIC_TLS_KEY for the public port of
a router, TANDEM_MESH_TLS_CERT, TANDEM_MESH_TLS_KEY and TANDEM_MESH_TLS_CA for workers.
"""


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(MemberSettings, PublicTlsSettings):
    """The settings of the service that are needed to connect to it."""

    def identities(self) -> Iterator[TlsIdentity | None]:
        """Yield the TLS identities to try, None for plaintext: it is not known which port of the service is probed.
        Raises ConfigurationError."""
        if (files := self.public_tls_files()) is not None:
            yield TlsIdentity.load(*files).for_itself()
        if (tls := self.load_credentials().tls) is not None:
            yield tls.for_itself()
        if not (self.mesh_tls_cert and self.public_tls_cert):
            yield None


def main(argv: list[str]) -> int:
    """Probe once. Return the exit status."""
    if argv in (["-h"], ["--help"]):
        sys.stdout.write(_USAGE)
        return 0
    if len(argv) != 1 or argv[0].startswith("-"):
        sys.stderr.write(_USAGE)
        return 2
    try:
        identities = list(load_settings(ProbeSettings, [], prog="probe").values.identities())
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for tls in identities:
        try:
            status = _health(argv[0], tls)
        except grpc.RpcError as error:
            sys.stderr.write(f"{argv[0]}: {error.code().name} {'without TLS' if tls is None else 'over TLS'}\n")
            continue
        sys.stdout.write(f"{argv[0]}: {status}\n")
        return 0 if status == "SERVING" else 1
    return 1


def _health(address: str, tls: TlsIdentity | None) -> str:
    """Query the health service. Raises grpc.RpcError."""
    if tls is None:
        channel = grpc.insecure_channel(address, options=[NO_PROXY])
    else:
        channel = grpc.secure_channel(address, tls.channel_credentials(), options=[NO_PROXY, *tls.channel_options()])
    with channel:
        response = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
