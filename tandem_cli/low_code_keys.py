"""Maps the keys of LMI and TGI to settings, as one table, and converts their values.

Every conversion may raise ConfigurationError.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mesh.domain.errors import ConfigurationError

_DTYPES: Mapping[str, str] = MappingProxyType(
    {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
)
_FP8 = ("fp8", "fp8_e4m3", "fp8_e4m3fn", "float8_e4m3fn")
_FORMATTERS: Mapping[str, str] = MappingProxyType(
    {
        **{name: name for name in ("json", "jsonlines", "sse")},
        **{f"{name}_chat": name for name in ("json", "jsonlines", "sse")},
    }
)
_BYTES_OF_MB = 1 << 20
_ONE = ("1", "max")
_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")
_SPECULATION: Mapping[str, str] = MappingProxyType(
    {
        "method": "decode.speculative",
        "model": "decode.draft_model",
        "num_speculative_tokens": "decode.num_speculative_tokens",
    }
)
_METHODS: Mapping[str, str] = MappingProxyType({"ngram": "ngram", "draft_model": "draft"})
_WORKERS = ("prefill", "decode")
ROPE_NAMES = ("ROPE_SCALING", "ROPE_FACTOR", "ROPE_SCALING and ROPE_FACTOR")
"""Variables of TGI, which together are one value."""
_BATCHES = "batching is always continuous"
_SEPARATE = "prefill runs on separate workers"
_DEVICES = "see --prefill and --decode"
_FIXED = "the limit is fixed, see docs/http.md"
_ONE_DRAFT_RANK = "one process of a worker runs the draft model"
_NO_ADDRESSES = "ranks need no address here; those on other machines dial rank_listen, see docs/parallel.md"
_ALL_TRACED = tuple(f"{role}.otlp_endpoint" for role in ("router", *_WORKERS, "gateway"))


Convert = Callable[[str], str]


def as_is(value: str) -> str:
    """The unchanged value. The service checks it."""
    return value


def dtype(value: str) -> str:
    """A type name, also from the short names of LMI. int8 is rejected, because it is not a type here."""
    if value.lower() == "int8":
        raise ConfigurationError("int8 is not a dtype: set option.quantize=int8")
    return _DTYPES.get(value.lower(), value)


def kv_dtype(value: str) -> str:
    """A type of KV. Other types of fp8 than e4m3, which TGI and vLLM have, are rejected."""
    name = value.lower()
    if name.startswith("fp8_") and name not in _FP8:
        raise ConfigurationError(f"KV in {name} is not supported: use fp8, which is e4m3")
    return "fp8" if name in _FP8 else _DTYPES.get(name, value)


def formatter(value: str) -> str:
    """An output formatter. The variants for chat map to the plain formatters."""
    if value not in _FORMATTERS:
        raise ConfigurationError(f"expected one of {', '.join(_FORMATTERS)}, got {value!r}")
    return _FORMATTERS[value]


def one_draft_rank(value: str) -> str:
    """The number of ranks of the draft model, which must be 1."""
    if value not in _ONE:
        raise ConfigurationError(f"{_ONE_DRAFT_RANK}: expected 1, got {value!r}")
    return value


def megabytes(value: str) -> str:
    """Convert a number of megabytes to bytes."""
    return str(round(number(value) * _BYTES_OF_MB))


def number(value: str, before: str = "") -> float:
    """A number. `before` is a prefix for the error message."""
    try:
        return float(value)
    except ValueError:
        raise ConfigurationError(f"{before}expected a number, got {value!r}") from None


def lmi_schema(value: str) -> str:
    """The wire format for LMI's async_mode: "async" or "rolling"."""
    return "async" if flag(value) else "rolling"


def flag(value: str) -> bool:
    """A boolean in any common spelling."""
    if value.lower() not in (*_TRUE, *_FALSE):
        raise ConfigurationError(f"expected true or false, got {value!r}")
    return value.lower() in _TRUE


def off_only(value: str) -> str:
    """A feature that must stay off."""
    if flag(value):
        raise ConfigurationError("this is not supported")
    return value


def sharded(value: str) -> str:
    """The degree that TGI's SHARDED means: as many ranks as the machine has places for, or one."""
    return "max" if flag(value) else "1"


def degree(value: str) -> str:
    """A degree of tensor parallelism. SageMaker sets SM_NUM_GPUS=0 where there is no GPU: one rank, on CPU."""
    return "1" if value.strip() == "0" else value


def all_graphs(value: str) -> str:
    """The sizes of batches that ENABLE_CUDA_GRAPHS, a boolean, means."""
    return "auto" if flag(value) else "0"


def handler_file(value: str) -> str:
    """The file of a handler; empty for LMI's built-in entry points, which need none."""
    return "" if value.startswith("djl_python.") else value


def speculation(value: str) -> dict[str, str]:
    """Settings from vLLM's JSON object {"method": ..., "model": ..., "num_speculative_tokens": ...}."""
    try:
        options = json.loads(value)
    except ValueError as error:
        raise ConfigurationError(f"expected a JSON object: {error}") from None
    if not isinstance(options, dict):
        raise ConfigurationError("expected a JSON object")
    if unknown := options.keys() - _SPECULATION.keys():
        raise ConfigurationError(f"not supported: {', '.join(sorted(unknown))}; known are {', '.join(_SPECULATION)}")
    method = options.get("method", "draft_model" if "model" in options else "ngram")
    if method not in _METHODS:
        raise ConfigurationError(f"method must be ngram or draft_model, got {method!r}")
    return {_SPECULATION[name]: str(option) for name, option in options.items()} | {
        "decode.speculative": _METHODS[method]
    }


@dataclass(frozen=True, slots=True)
class Knob:
    """One key of serving.properties.

    `targets` are the settings that it sets, as ROLE.NAME, or up.NAME for `tandem up` itself. A key without targets is
    accepted, but has no effect, for the reason in `note`. `also` are other names in serving.properties. `env` are
    variables besides OPTION_*, in order of precedence. `spread` splits one value into several settings, by target. With
    `is_file`, a path in serving.properties is relative to the folder of that file. With `is_secret`, the value is never
    shown.
    """

    key: str
    targets: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    convert: Convert = as_is
    note: str = ""
    spread: Callable[[str], Mapping[str, str]] | None = None
    is_file: bool = False
    is_secret: bool = False


def _workers(name: str) -> tuple[str, ...]:
    return tuple(f"{role}.{name}" for role in _WORKERS)


def _models(name: str) -> tuple[str, ...]:
    """A setting of all services that read files of the model."""
    return (*_workers(name), f"router.{name}")


KNOBS = (
    Knob("option.model_id", ("up.model",), env=("MODEL_ID", "HF_MODEL_ID"), also=("option.s3url",)),
    Knob("option.revision", ("up.revision",), env=("REVISION", "HF_MODEL_REVISION", "HF_REVISION")),
    Knob(
        "option.trust_remote_code",
        env=("TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"),
        note="code of checkpoints is never run",
    ),
    Knob("option.sharded", _workers("tensor_parallel"), env=("SHARDED",), convert=sharded),  # a degree has precedence
    Knob(
        "option.tensor_parallel_degree",
        _workers("tensor_parallel"),
        env=("TENSOR_PARALLEL_DEGREE", "SM_NUM_GPUS", "NUM_SHARD"),
        convert=degree,
        also=("option.tensor_parallel_size",),
    ),
    Knob(
        "option.pipeline_parallel_degree",
        _workers("pipeline_parallel"),
        env=("PIPELINE_PARALLEL_DEGREE",),
        also=("option.pipeline_parallel_size",),
    ),
    Knob("option.prefill_workers", ("up.prefill",)),
    Knob("option.decode_workers", ("up.decode",)),
    Knob("option.colocated", ("up.colocated",)),
    Knob("engine", note="there is one engine"),
    Knob("option.mpi_mode", note="there is one engine"),
    Knob("option.rolling_batch", note=_BATCHES),
    Knob("option.async_mode", ("gateway.lmi_schema",), convert=lmi_schema),
    Knob("option.lmi_schema", ("gateway.lmi_schema",)),
    Knob("option.output_formatter", ("gateway.output_formatter",), convert=formatter),
    Knob("option.tgi_compat", ("gateway.tgi_compat",), env=("COMPAT_TGI",)),
    Knob(
        "option.max_rolling_batch_size",
        ("decode.max_rolling_batch_size",),
        env=("MAX_BATCH_SIZE",),
        also=("option.max_num_seqs",),
    ),
    Knob(
        "option.max_rolling_batch_prefill_tokens",
        ("prefill.max_batch_prefill_tokens",),
        env=("MAX_BATCH_PREFILL_TOKENS",),
        also=("option.max_num_batched_tokens", "option.max_batch_prefill_tokens"),
    ),
    Knob("option.max_batch_total_tokens", ("decode.max_batch_total_tokens",), env=("MAX_BATCH_TOTAL_TOKENS",)),
    Knob(
        "option.max_input_tokens",
        ("router.max_input_length",),
        env=("MAX_INPUT_TOKENS", "MAX_INPUT_LENGTH"),
        also=("option.max_input_length",),
    ),
    Knob("option.max_total_tokens", ("router.max_total_tokens",), env=("MAX_TOTAL_TOKENS",)),
    Knob("option.max_model_len", _workers("max_model_len"), also=("option.max_seq_len",)),
    Knob("option.rope_scaling", _models("rope_scaling"), env=ROPE_NAMES),
    Knob("option.rope_theta", _models("rope_theta")),
    Knob(
        "job_queue_size",
        ("router.max_concurrent_requests", "router.max_queued_requests"),
        env=("SERVING_JOB_QUEUE_SIZE", "MAX_CONCURRENT_REQUESTS"),
    ),
    Knob("max_client_batch_size", ("gateway.max_client_batch_size",), env=("MAX_CLIENT_BATCH_SIZE",)),
    Knob("option.dtype", _workers("dtype"), env=("DTYPE",), convert=dtype),
    Knob(
        "option.quantize",
        _workers("quantize"),
        env=("QUANTIZE", "HF_MODEL_QUANTIZE"),
        also=("option.quantization",),
    ),
    Knob(
        "option.kv_cache_dtype",
        _workers("kv_dtype"),
        env=("KV_CACHE_DTYPE", "KV_DTYPE"),
        also=("option.kv_dtype",),
        convert=kv_dtype,
    ),
    Knob("option.save_mp_checkpoint_path", ("up.partition",), is_file=True),
    Knob("option.load_format", _workers("load_format")),
    Knob("option.gpu_memory_utilization", _workers("memory_utilization"), env=("CUDA_MEMORY_FRACTION",)),
    Knob(
        "option.enable_prefix_caching",
        _workers("prefix_caching"),
        env=("PREFIX_CACHING", "USE_PREFIX_CACHING"),
        also=("option.enable_kv_cache_reuse",),
    ),
    Knob(
        "option.model_loading_timeout",
        ("up.model_loading_timeout",),
        env=("MODEL_LOADING_TIMEOUT", "SAGEMAKER_STARTUP_TIMEOUT"),
    ),
    Knob(
        "option.predict_timeout",
        ("gateway.request_timeout_s",),
        env=("PREDICT_TIMEOUT", "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS"),
    ),
    Knob(
        "max_request_size",
        ("gateway.max_body_bytes",),
        env=("SERVING_MAX_REQUEST_SIZE", "SAGEMAKER_MAX_REQUEST_SIZE", "PAYLOAD_LIMIT"),
    ),
    Knob(
        "max_payload_in_mb",
        ("gateway.max_body_bytes",),
        env=("SAGEMAKER_MAX_PAYLOAD_IN_MB",),
        convert=megabytes,
    ),
    Knob("option.waiting_served_ratio", env=("WAITING_SERVED_RATIO",), note=_SEPARATE),
    Knob("option.max_waiting_tokens", env=("MAX_WAITING_TOKENS",), note=_SEPARATE),
    Knob("option.waiting_steps", note=_SEPARATE),
    Knob("option.enable_chunked_prefill", note="prompts are always computed in chunks"),
    Knob("option.enable_auto_tool_choice", note="tool calls are parsed if their format is known"),
    Knob("option.disable_grammar_support", ("router.disable_grammar_support",), env=("DISABLE_GRAMMAR_SUPPORT",)),
    Knob("option.enforce_eager", _workers("enforce_eager"), env=("ENFORCE_EAGER",)),
    Knob("option.enable_cuda_graphs", ("decode.cuda_graphs",), env=("ENABLE_CUDA_GRAPHS",), convert=all_graphs),
    Knob("option.cuda_graphs", ("decode.cuda_graphs",), env=("CUDA_GRAPHS",)),  # has precedence
    Knob("option.max_best_of", env=("MAX_BEST_OF",), note=_FIXED),
    Knob("option.max_stop_sequences", env=("MAX_STOP_SEQUENCES",), note=_FIXED),
    Knob("option.max_top_n_tokens", env=("MAX_TOP_N_TOKENS",), note=_FIXED),
    Knob("option.tgi_v1", env=("TGI_V1",), note="without max_new_tokens an answer may take the rest of the budget"),
    Knob("option.master_addr", env=("MASTER_ADDR",), note=_NO_ADDRESSES),
    Knob("option.master_port", env=("MASTER_PORT",), note=_NO_ADDRESSES),
    Knob("option.shard_uds_path", env=("SHARD_UDS_PATH",), note=_NO_ADDRESSES),
    Knob("option.validation_workers", env=("VALIDATION_WORKERS",), note="the router manages its tokenizer threads"),
    Knob("option.prometheus_port", ("up.metrics_port",), env=("PROMETHEUS_PORT",)),
    Knob(
        "option.graceful_termination_timeout",
        ("router.grace_s", "gateway.grace_s"),
        env=("GRACEFUL_TERMINATION_TIMEOUT",),
    ),
    Knob("option.otlp_endpoint", _ALL_TRACED, env=("OTLP_ENDPOINT",)),
    Knob("option.usage_stats", env=("USAGE_STATS",), note="usage is never reported"),
    Knob(
        "option.tokenizer_config_path", env=("TOKENIZER_CONFIG_PATH",), note="the tokenizer of the checkpoint is used"
    ),
    Knob(
        "option.enable_prefill_logprobs",
        env=("ENABLE_PREFILL_LOGPROBS",),
        note="set it per request",
    ),
    Knob(
        "option.attention",
        env=("ATTENTION",),
        note="the fastest that can run is chosen; --attention forces one",
    ),
    Knob("option.api_key", env=("API_KEY",), note="keys are in a file, see --api-keys-file", is_secret=True),
    Knob("option.enable_streaming", note="set it per request"),
    Knob("option.parallel_loading", note="workers always load in parallel"),
    Knob("option.task", note="only text generation is supported"),
    Knob("option.device_map", note=_DEVICES),
    Knob("load_on_devices", note=_DEVICES),
    Knob("minWorkers", env=("SERVING_MIN_WORKERS",), also=("gpu.minWorkers",), note=_DEVICES),
    Knob("maxWorkers", env=("SERVING_MAX_WORKERS",), also=("gpu.maxWorkers",), note=_DEVICES),
    Knob("batch_size", env=("SERVING_BATCH_SIZE",), also=("max_dynamic_batch_size",), note=_BATCHES),
    Knob("max_batch_delay", env=("SERVING_MAX_BATCH_DELAY",), note=_BATCHES),
    Knob("max_idle_time", env=("SERVING_MAX_IDLE_TIME",), note="idle workers keep running"),
    Knob("retry_threshold", env=("SERVING_RETRY_THRESHOLD",), note="workers that exit are always restarted"),
    Knob("chunked_read_timeout", env=("SERVING_CHUNKED_READ_TIMEOUT",), note="see --slow-reader-s"),
    Knob(
        "option.entryPoint",
        ("gateway.handler",),
        env=("DJL_ENTRY_POINT",),
        convert=handler_file,
        is_file=True,
    ),
    Knob("option.handler", ("gateway.handler_function",)),
    Knob("option.enable_lora", note="adapters are served where option.adapters or --adapter names some"),
    Knob("option.adapters", _workers("adapter"), is_file=True),
    Knob("option.lora_adapters", _workers("adapter"), env=("LORA_ADAPTERS",)),
    Knob("option.max_loras", note="all adapters in memory may be in one batch"),
    Knob("option.max_cpu_loras", _workers("max_loaded_adapters")),
    Knob("option.speculative_config", spread=speculation),
    Knob("option.speculative_draft_model", ("decode.draft_model",), also=("option.draft_model_id",)),
    Knob(
        "option.speculative_length",
        ("decode.num_speculative_tokens",),
        env=("SPECULATE",),
        also=("option.spec_length",),
    ),
    Knob("option.draft_model_tp_size", convert=one_draft_rank, note=_ONE_DRAFT_RANK),
    Knob("option.record_acceptance_rate", note="always recorded"),
    Knob("option.bedrock_compat", convert=off_only, note="always off"),
)

SECRET_VARIABLES = frozenset(
    name for knob in KNOBS if knob.is_secret for name in (knob.key.replace("option.", "OPTION_").upper(), *knob.env)
)
"""Variables with secrets."""
