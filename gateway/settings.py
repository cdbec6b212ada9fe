"""The gateway's settings, with the environment variables of LMI and TGI containers as aliases."""

import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mesh.domain.errors import ConfigurationError
from mesh.process import ProcessSettings
from mesh.public_tls import CertificateReloader, PublicTlsSettings, server_context
from mesh.setting_checks import require_above_zero
from mesh.settings import setting

LMI_SCHEMAS = ("rolling", "0.26", "async")
TOOL_CALL_PARSERS = (
    *("auto", "none", "hermes", "llama3_json", "mistral", "phi4_mini_json", "granite"),
    *("hunyuan_a13b", "qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v3", "deepseek_v31", "kimi_k2"),
    *("cohere_command3", "cohere_command4", "apertus", "gemma4", "lfm2", "olmo3", "pythonic", "llama4_pythonic"),
    "openai",
)
REASONING_PARSERS = (
    *("auto", "none", "qwen3", "deepseek_r1", "mistral", "seed_oss", "cohere_command3", "cohere_command4"),
    *("hunyuan_a13b", "kimi_k2", "minimax_m2", "apertus", "gemma4"),
)
OUTPUT_FORMATTERS = ("auto", "json", "jsonlines", "sse")

_ALLOWED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lmi_schema": LMI_SCHEMAS,
        "output_formatter": OUTPUT_FORMATTERS,
        "tool_call_parser": TOOL_CALL_PARSERS,
        "reasoning_parser": REASONING_PARSERS,
    }
)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ProcessSettings, PublicTlsSettings):
    """Settings of the gateway. Raises ConfigurationError on construction if one is invalid."""

    router: str = setting("127.0.0.1:50051", "router's address; several are separated by commas")
    router_tls: bool = setting(False, "speak TLS with the router")
    router_tls_ca: str = setting("", "PEM file: the CA of the router's certificate, or the certificate itself")
    router_tls_name: str = setting("", "name in the router's certificate; default: the address")
    host: str = setting("127.0.0.1", "address HTTP clients reach", env=("HOSTNAME",))
    port: int = setting(8080, "port HTTP clients reach; 0 takes a free one", env=("PORT",))
    allow_anonymous: bool = setting(False, "listen beyond loopback even if the router asks for no API keys")

    max_body_bytes: int = setting(8 << 20, "most bytes of a request body; more is refused", env=("PAYLOAD_LIMIT",))
    max_bodies_bytes: int = setting(256 << 20, "most bytes that all open requests' bodies hold beyond 64 KiB each")
    max_open_requests: int = setting(1000, "requests being answered at a time; more are refused at once")
    max_connections: int = setting(4096, "connections open at a time; a new one closes the one that is idle longest")
    max_client_batch_size: int = setting(32, "most prompts of one request", env=("MAX_CLIENT_BATCH_SIZE",))
    request_timeout_s: float = setting(600.0, "seconds an answer may take")
    header_timeout_s: float = setting(10.0, "seconds in which a new connection must send a request's headers")
    body_timeout_s: float = setting(30.0, "seconds a client may take to send its request body")
    slow_reader_s: float = setting(30.0, "a client that takes nothing for this long is cut off")
    ping_interval_s: float = setting(10.0, "seconds of silence after which an SSE stream gets a comment, at most 15")
    grace_s: float = setting(10.0, "how long running answers may go on after SIGTERM")
    allowed_hosts: str = setting(
        "",
        "names, separated by commas, under which clients may call this gateway while the router asks for no API keys; "
        "IP addresses and localhost always may",
    )
    cors_allow_origin: str = setting(
        "", "origins, separated by commas, whose pages may call; default: none", env=("CORS_ALLOW_ORIGIN",)
    )

    batch_folder: str = setting("", "folder for /v1/files and /v1/batches; default: neither is served")
    batch_max_bytes: int = setting(1 << 30, "most bytes of each API key's files in batch_folder, answers included")
    batch_concurrency: int = setting(16, "requests of batches under way at a time")

    lmi_schema: str = setting(
        "rolling", f"generation of LMI's format: {', '.join(LMI_SCHEMAS)}", env=("OPTION_LMI_SCHEMA",)
    )
    output_formatter: str = setting(
        "auto",
        f"answers of /invocations: {', '.join(OUTPUT_FORMATTERS)}; auto: as the request's stream says",
        env=("OPTION_OUTPUT_FORMATTER",),
    )
    tool_call_parser: str = setting(
        "auto", f"how the model writes calls of functions: {', '.join(TOOL_CALL_PARSERS)}; auto: as its template does"
    )
    reasoning_parser: str = setting(
        "auto",
        f"where reasoning ends: {', '.join(REASONING_PARSERS)}; auto: at the mark that the model's template has",
    )
    handler: str = setting("", "model.py of your own, which answers /invocations; see docs/http.md")
    handler_function: str = setting("handle", "name of the handler's function", env=("OPTION_HANDLER",))
    handler_properties: str = setting("{}", "JSON object: properties for the handler's inputs", secret=True)
    handler_start_s: float = setting(600.0, "seconds in which the handler must have loaded")
    tgi_compat: bool = setting(False, "/invocations answers as TGI does", env=("OPTION_TGI_COMPAT", "COMPAT_TGI"))

    def __post_init__(self) -> None:
        super().__post_init__()
        require_above_zero(self, "max_body_bytes", "max_bodies_bytes", "max_open_requests", "max_connections")
        require_above_zero(self, "max_client_batch_size", "batch_max_bytes", "batch_concurrency", "request_timeout_s")
        require_above_zero(self, "handler_start_s", "header_timeout_s", "body_timeout_s", "slow_reader_s", "grace_s")
        if not 0 < self.ping_interval_s <= 15:
            raise ConfigurationError(f"ping_interval_s must be in (0, 15], got {self.ping_interval_s:g}")
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port must be in [0, 65535], got {self.port}")
        for name, allowed in _ALLOWED.items():
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        parse_properties(self.handler_properties)
        if self.handler and not Path(self.handler).is_file():
            raise ConfigurationError(f"handler must be a file with Python code, and {self.handler} is none")
        if not self.router_tls and (self.router_tls_ca or self.router_tls_name):
            raise ConfigurationError("router_tls_ca and router_tls_name need router_tls")
        self.load_public_tls()

    def load_public_tls(self) -> CertificateReloader[ssl.SSLContext] | None:
        """Read the certificate; None for plain HTTP. Raises ConfigurationError."""
        files = self.public_tls_files()
        return CertificateReloader(files, server_context) if files else None

    @property
    def allowed_origins(self) -> list[str]:
        return _split(self.cors_allow_origin)

    @property
    def allowed_host_names(self) -> list[str]:
        return _split(self.allowed_hosts.lower())


def _split(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def parse_properties(text: str) -> dict[str, str]:
    """Parse a handler's properties: strings only, as in LMI. Error messages omit the values, which may be secret."""
    try:
        properties = json.loads(text)
    except ValueError:
        properties = None
    if not isinstance(properties, dict) or not all(isinstance(value, str) for value in properties.values()):
        raise ConfigurationError("handler_properties must be a JSON object of strings")
    return properties
