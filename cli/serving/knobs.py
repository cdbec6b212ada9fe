"""What the keys of LMI and TGI mean here: one table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cli.serving import conversions as to
from cli.serving.conversions import Convert

_WORKERS = ("prefill", "decode")


@dataclass(frozen=True, slots=True)
class Knob:
    """One key of serving.properties.

    `targets` are settings as ROLE.NAME, those of `tandem up` itself as up.NAME; without any, the key is known and has
    no effect, for the reason in `note`. `also` are its other names in serving.properties, `env` names of variables
    beside OPTION_*, the strongest first. With `spread` one value holds several settings, by target. A value that
    `is_file` is relative to the folder of serving.properties, if it stands there; one that `is_secret` is never shown.
    """

    key: str
    targets: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    convert: Convert = to.as_is
    note: str = ""
    spread: Callable[[str], Mapping[str, str]] | None = None
    is_file: bool = False
    is_secret: bool = False


def _workers(name: str) -> tuple[str, ...]:
    return tuple(f"{role}.{name}" for role in _WORKERS)


_BATCHES = "batching is always continuous"
_SEPARATE = "prefill has workers of its own"
_DEVICES = "see --prefill and --decode"
_FIXED = "the limit is fixed, see docs/http.md"
_NO_GRAPHS = "there are no CUDA graphs; option.enforce_eager turns the compiled decoder off"

KNOBS = (
    Knob("option.model_id", ("up.model",), env=("MODEL_ID", "HF_MODEL_ID")),
    Knob("option.revision", ("up.revision",), env=("REVISION", "HF_MODEL_REVISION", "HF_REVISION")),
    Knob(
        "option.trust_remote_code",
        env=("TRUST_REMOTE_CODE", "HF_MODEL_TRUST_REMOTE_CODE", "HF_TRUST_REMOTE_CODE"),
        note="no code comes with a model",
    ),
    Knob(
        "option.tensor_parallel_degree",
        env=("TENSOR_PARALLEL_DEGREE", "SM_NUM_GPUS", "NUM_SHARD"),
        also=("option.tensor_parallel_size",),
        convert=to.one_only,
        note=_DEVICES,
    ),
    Knob(
        "option.pipeline_parallel_degree",
        env=("PIPELINE_PARALLEL_DEGREE",),
        also=("option.pipeline_parallel_size",),
        convert=to.one_only,
        note=_DEVICES,
    ),
    Knob("engine", note="there is one engine"),
    Knob("option.mpi_mode", note="there is one engine"),
    Knob("option.rolling_batch", note=_BATCHES),
    Knob("option.async_mode", ("gateway.lmi_schema",), convert=to.lmi_schema),
    Knob("option.lmi_schema", ("gateway.lmi_schema",)),
    Knob("option.output_formatter", ("gateway.output_formatter",), convert=to.formatter),
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
    Knob("option.max_model_len", _workers("max_model_len")),
    Knob(
        "job_queue_size",
        ("router.max_concurrent_requests", "router.max_queued_requests"),
        env=("SERVING_JOB_QUEUE_SIZE", "MAX_CONCURRENT_REQUESTS"),
    ),
    Knob("max_client_batch_size", ("gateway.max_client_batch_size",), env=("MAX_CLIENT_BATCH_SIZE",)),
    Knob("option.dtype", _workers("dtype"), env=("DTYPE",), convert=to.dtype),
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
        convert=to.kv_dtype,
    ),
    Knob("option.load_format", _workers("load_format")),
    Knob("option.gpu_memory_utilization", _workers("kv_memory_fraction"), env=("CUDA_MEMORY_FRACTION",)),
    Knob("option.enable_prefix_caching", _workers("prefix_caching"), also=("option.enable_kv_cache_reuse",)),
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
        convert=to.megabytes,
    ),
    Knob("option.waiting_served_ratio", env=("WAITING_SERVED_RATIO",), note=_SEPARATE),
    Knob("option.max_waiting_tokens", env=("MAX_WAITING_TOKENS",), note=_SEPARATE),
    Knob("option.waiting_steps", note=_SEPARATE),
    Knob("option.enable_chunked_prefill", note="prompts are always computed in chunks"),
    Knob("option.enable_auto_tool_choice", note="calls are read where their format is known"),
    Knob("option.disable_grammar_support", ("router.disable_grammar_support",), env=("DISABLE_GRAMMAR_SUPPORT",)),
    Knob("option.enforce_eager", _workers("enforce_eager"), env=("ENFORCE_EAGER",)),
    Knob("option.enable_cuda_graphs", env=("ENABLE_CUDA_GRAPHS",), note=_NO_GRAPHS),
    Knob("option.cuda_graphs", env=("CUDA_GRAPHS",), note=_NO_GRAPHS),
    Knob("option.max_best_of", env=("MAX_BEST_OF",), note=_FIXED),
    Knob("option.max_stop_sequences", env=("MAX_STOP_SEQUENCES",), note=_FIXED),
    Knob("option.max_top_n_tokens", env=("MAX_TOP_N_TOKENS",), note=_FIXED),
    Knob("option.tgi_v1", env=("TGI_V1",), note="without max_new_tokens an answer may take the rest of the budget"),
    Knob("option.api_key", env=("API_KEY",), note="keys are in a file, see --api-keys-file", is_secret=True),
    Knob("option.enable_streaming", note="each request says whether it streams"),
    Knob("option.parallel_loading", note="workers load side by side"),
    Knob("option.task", note="text generation is the only one"),
    Knob("option.device_map", note=_DEVICES),
    Knob("load_on_devices", note=_DEVICES),
    Knob("minWorkers", env=("SERVING_MIN_WORKERS",), also=("gpu.minWorkers",), note=_DEVICES),
    Knob("maxWorkers", env=("SERVING_MAX_WORKERS",), also=("gpu.maxWorkers",), note=_DEVICES),
    Knob("batch_size", env=("SERVING_BATCH_SIZE",), also=("max_dynamic_batch_size",), note=_BATCHES),
    Knob("max_batch_delay", env=("SERVING_MAX_BATCH_DELAY",), note=_BATCHES),
    Knob("max_idle_time", env=("SERVING_MAX_IDLE_TIME",), note="workers stay"),
    Knob("retry_threshold", env=("SERVING_RETRY_THRESHOLD",), note="workers that die are always started again"),
    Knob("chunked_read_timeout", env=("SERVING_CHUNKED_READ_TIMEOUT",), note="see --slow-reader-s"),
    Knob(
        "option.entryPoint",
        ("gateway.handler",),
        env=("DJL_ENTRY_POINT",),
        convert=to.handler_file,
        is_file=True,
    ),
    Knob("option.handler", ("gateway.handler_function",)),
    Knob("option.enable_lora", convert=to.off_only, note="it is off"),
    Knob("option.lora_adapters", env=("LORA_ADAPTERS",), note="there are no adapters"),
    Knob("option.speculative_config", spread=to.speculation),
    Knob("option.speculative_draft_model", ("decode.draft_model",), also=("option.draft_model_id",)),
    Knob(
        "option.speculative_length",
        ("decode.num_speculative_tokens",),
        env=("SPECULATE",),
        also=("option.spec_length",),
    ),
    Knob("option.draft_model_tp_size", convert=to.one_only, note=_DEVICES),
    Knob("option.record_acceptance_rate", note="it always is"),
    Knob("option.bedrock_compat", convert=to.off_only, note="it is off"),
)
