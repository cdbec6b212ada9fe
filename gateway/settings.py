"""The gateway's settings."""

import json
from dataclasses import dataclass

from mesh.domain.errors import ConfigurationError
from mesh.process import ProcessSettings
from mesh.settings import setting

LMI_SCHEMAS = ("rolling", "0.26", "async")
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral")
OUTPUT_FORMATTERS = ("auto", "json", "jsonlines", "sse")

_POSITIVE = (
    "max_body_bytes",
    "max_open_requests",
    "max_client_batch_size",
    "request_timeout_s",
    "handler_start_s",
    "body_timeout_s",
    "slow_reader_s",
    "grace_s",
)


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(ProcessSettings):
    """Checked on construction."""

    router: str = setting("127.0.0.1:50051", "router's address; several with commas between")
    router_tls: bool = setting(False, "speak TLS with the router")
    router_tls_ca: str = setting("", "PEM file: the CA of the router's certificate, or the certificate itself")
    router_tls_name: str = setting("", "name in the router's certificate; default: the address")
    host: str = setting("127.0.0.1", "address HTTP clients reach", env=("HOSTNAME",))
    port: int = setting(8080, "port HTTP clients reach; 0 takes a free one", env=("PORT",))
    allow_anonymous: bool = setting(False, "listen beyond loopback though the router asks for no API keys")

    max_body_bytes: int = setting(8 << 20, "most bytes of a request body; more is refused", env=("PAYLOAD_LIMIT",))
    max_open_requests: int = setting(1000, "requests open at a time; more are refused at once")
    max_client_batch_size: int = setting(32, "most prompts of one request", env=("MAX_CLIENT_BATCH_SIZE",))
    request_timeout_s: float = setting(600.0, "seconds an answer may take")
    body_timeout_s: float = setting(30.0, "seconds a client may take to send its request body")
    slow_reader_s: float = setting(30.0, "a client that takes nothing for this long is cut off")
    ping_interval_s: float = setting(10.0, "seconds of silence after which an SSE stream gets a comment, at most 15")
    grace_s: float = setting(10.0, "how long running answers may go on after SIGTERM")
    cors_allow_origin: str = setting(
        "", "origins, with commas between, whose pages may call; default: none", env=("CORS_ALLOW_ORIGIN",)
    )

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
    handler: str = setting("", "model.py of your own, which answers /invocations; see docs/http.md")
    handler_function: str = setting("handle", "name of the function in it", env=("OPTION_HANDLER",))
    handler_properties: str = setting("{}", "JSON object: properties for its inputs", secret=True)
    handler_start_s: float = setting(600.0, "seconds in which the handler must have loaded")
    tgi_compat: bool = setting(False, "/invocations answers as TGI does", env=("OPTION_TGI_COMPAT", "COMPAT_TGI"))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in _POSITIVE:
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigurationError(f"{name} must be > 0, got {getattr(self, name):g}")
        if not 0 < self.ping_interval_s <= 15:
            raise ConfigurationError(f"ping_interval_s must be in (0, 15], got {self.ping_interval_s:g}")
        if not 0 <= self.port <= 65535:
            raise ConfigurationError(f"port must be in [0, 65535], got {self.port}")
        if self.lmi_schema not in LMI_SCHEMAS:
            raise ConfigurationError(f"lmi_schema must be one of {', '.join(LMI_SCHEMAS)}, got {self.lmi_schema!r}")
        if self.output_formatter not in OUTPUT_FORMATTERS:
            known = ", ".join(OUTPUT_FORMATTERS)
            raise ConfigurationError(f"output_formatter must be one of {known}, got {self.output_formatter!r}")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            known = ", ".join(TOOL_CALL_PARSERS)
            raise ConfigurationError(f"tool_call_parser must be one of {known}, got {self.tool_call_parser!r}")
        parse_properties(self.handler_properties)
        if not self.router_tls and (self.router_tls_ca or self.router_tls_name):
            raise ConfigurationError("router_tls_ca and router_tls_name need router_tls")

    @property
    def allowed_origins(self) -> list[str]:
        """Origins whose pages may call."""
        return [origin.strip() for origin in self.cors_allow_origin.split(",") if origin.strip()]


def parse_properties(text: str) -> dict[str, str]:
    """Of a handler; LMI has texts only. Raises ConfigurationError, without the values: they may be secret."""
    try:
        properties = json.loads(text)
    except ValueError:
        properties = None
    if not isinstance(properties, dict) or not all(isinstance(value, str) for value in properties.values()):
        raise ConfigurationError("handler_properties must be a JSON object of texts")
    return properties
