"""The router's settings, with their checks."""

from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint.settings import ModelSettings
from checkpoint.source import split_models
from mesh.domain.errors import ConfigurationError
from mesh.public_tls import CertificateReloader, PublicTlsSettings
from mesh.rpc.credentials import TlsIdentity
from mesh.setting_checks import require_above_zero, require_at_least
from mesh.settings import setting
from router.tenants import TRIAL, KeysFile

_COUNTS = (
    "max_concurrent_requests",
    "max_queued_requests",
    "max_input_length",
    "max_total_tokens",
    "max_attempts",
    "max_worker_losses",
    "trip_after",
)
_DURATIONS = (
    "ttft_target_s",
    "no_worker_timeout_s",
    "reserve_timeout_s",
    "prefill_timeout_s",
    "stall_timeout_s",
    "max_replays_per_s",
    "canary_timeout_s",
    "slow_reader_s",
    "grace_s",
    "switch_after_s",
    "switch_pause_s",
)
_NOT_NEGATIVE = ("prefill_threshold", "prefill_overflow", "expect_prefill", "expect_decode")


@dataclass(frozen=True, kw_only=True)
class RouterSettings(ModelSettings, PublicTlsSettings):
    """Settings of all models of a router. The constructor raises ConfigurationError for bad values."""

    host: str = setting("127.0.0.1", "address clients reach")
    port: int = setting(50051, "port clients reach; 0 takes a free one", env=("PORT",))
    registry_host: str = setting("127.0.0.1", "address workers register at")
    registry_port: int = setting(50052, "port workers register at; 0 takes a free one")
    registry_url: str = setting(
        "", "redis://... or rediss://...: share workers and permits with other routers", secret=True
    )
    api_keys_file: str = setting("", "TOML file of API keys (see: tandem keys); without one, clients need no key")
    allow_anonymous: bool = setting(False, "allow listening beyond loopback without API keys")
    trial_key_sha256: str = setting("", "SHA-256 of the key that `tandem up` tests the mesh with", secret=True)

    max_concurrent_requests: int = setting(
        128, "choices in service at a time; more are refused at once", env=("MAX_CONCURRENT_REQUESTS",)
    )
    max_queued_requests: int = setting(
        128, "attempts waiting for workers, choices of one prompt counted once; more are refused at once"
    )
    ttft_target_s: float | None = setting(
        None, "default ttft_target of requests: a first token after this many seconds is worthless and not waited for"
    )
    max_input_length: int | None = setting(
        None, "maximum prompt tokens; default: max_total_tokens - 1", env=("MAX_INPUT_LENGTH", "MAX_INPUT_TOKENS")
    )
    max_total_tokens: int | None = setting(
        None,
        "maximum prompt and generated tokens; default: the capacity of the model and the decode workers",
        env=("MAX_TOTAL_TOKENS",),
    )
    generation_config: str = setting(
        "auto",
        "auto: HTTP requests without sampling parameters of their own get those of the model's generation_config.json, "
        "and answers end at its stop strings; none: neither",
    )
    disable_grammar_support: bool = setting(
        False, "refuse structured output: JSON schemas, regular expressions, grammars", env=("DISABLE_GRAMMAR_SUPPORT",)
    )
    prefill_threshold: int = setting(0, "prompts with fewer uncached tokens are prefilled by the decode worker")
    prefill_overflow: int = setting(
        512,
        "uncached prompt tokens that a decode worker may prefill at a time while the prefill workers are full, or "
        "twice as many of a single prompt; 0: none",
    )

    max_attempts: int = setting(10, "consecutive attempts without a new token before a request fails")
    max_worker_losses: int = setting(4, "consecutive worker losses without progress before a request fails")
    max_replays_per_s: float = setting(
        20.0, "rate of consecutive replays without progress, over all requests of a model; further replays wait"
    )
    trip_after: int = setting(3, "consecutive failures after which a worker gets no requests until a canary succeeds")
    canary_timeout_s: float = setting(10.0, "how long a canary, the tiny request that tests a worker, may take")
    no_worker_timeout_s: float = setting(15.0, "how long requests wait while there is no decode worker at all")
    reserve_timeout_s: float = setting(30.0, "how long a decode worker may take to reserve memory")
    prefill_timeout_s: float = setting(300.0, "how long a prompt may take to be computed and handed over")
    stall_timeout_s: float = setting(
        60.0,
        "a sequence without a token for this long is replayed elsewhere, whatever the worker says of itself; see a "
        "worker's stall_after_s",
    )
    slow_reader_s: float = setting(20.0, "a client that reads nothing for this long is cut off")
    grace_s: float = setting(10.0, "how long running streams may continue after SIGTERM")
    traffic: str = setting(
        "",
        "names that stand for several models of this router (revisions), with the share of new requests that each "
        "gets, as chat=v1:90,v2:10; several names are separated by ;. `tandem traffic` changes them",
    )
    switch_roles: bool = setting(
        False,
        "let switchable workers change their roles when this router's advice asks for one more worker of a role; never "
        "the last worker of a role",
    )
    switch_after_s: float = setting(30.0, "how long advice stands before switch_roles follows it")
    switch_pause_s: float = setting(120.0, "how long no worker has come or gone before switch_roles makes a switch")
    expect_prefill: int = setting(
        0,
        "number of prefill workers, over all models, to wait for before announcing ready; from 1 on, the first SERVING "
        "waits for one, too",
    )
    expect_decode: int = setting(1, "number of decode workers, over all models, to wait for before announcing ready")

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, 1, *_COUNTS)
        require_above_zero(self, *_DURATIONS)
        require_at_least(self, 0, *_NOT_NEGATIVE)
        if self.generation_config not in ("auto", "none"):
            raise ConfigurationError(f"generation_config must be auto or none, got {self.generation_config!r}")
        if self.max_input_length is not None and self.max_total_tokens is not None:
            require_input_below_total(self.max_input_length, self.max_total_tokens)
        self.load_public_tls()

    def each_model(self) -> "list[RouterSettings]":
        """Return the settings of every served model; `model` may be NAME=MODEL,NAME=MODEL.

        Raises ConfigurationError.
        """
        models = split_models(self.model)
        if self.name and len(models) > 1:
            raise ConfigurationError("name is for one model: several are named as in NAME=MODEL,NAME=MODEL")
        return [replace(self, model=model, name=name or self.name) for name, model in models]

    def load_api_keys(self) -> KeysFile | None:
        """Read the API keys file; None if none is configured. Raises ConfigurationError."""
        if not self.api_keys_file:
            return None
        more = {self.trial_key_sha256: TRIAL} if self.trial_key_sha256 else {}
        return KeysFile(Path(self.api_keys_file), more)

    def load_public_tls(self) -> CertificateReloader[TlsIdentity] | None:
        """Read the public port's certificate; None if none is configured. Raises ConfigurationError."""
        files = self.public_tls_files()
        return CertificateReloader(files, TlsIdentity.load) if files else None


def require_input_below_total(max_input_length: int, max_total_tokens: int) -> None:
    """Raise ConfigurationError unless the longest prompt leaves space for one generated token."""
    if max_input_length >= max_total_tokens:
        raise ConfigurationError(
            f"max_input_length must be < max_total_tokens, got {max_input_length} and {max_total_tokens}"
        )
