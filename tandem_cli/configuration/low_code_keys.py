"""Maps the keys of LMI, TGI and vLLM to settings, as one table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem_cli.configuration.low_code_values import (
    ONE_DRAFT_RANK,
    Convert,
    all_graphs,
    as_is,
    degree,
    dtype,
    formatter,
    handler_file,
    kv_dtype,
    lmi_schema,
    load_format,
    megabytes,
    off_only,
    one_draft_rank,
    quantization,
    sharded,
    speculation,
)

_WORKERS = ("prefill", "decode")
ROPE_NAMES = ("ROPE_SCALING", "ROPE_FACTOR", "ROPE_SCALING and ROPE_FACTOR")
"""Variables of TGI, which together are one value."""
_BATCHES = "batching is always continuous"
_TOKENIZER = "the tokenizer of the checkpoint is used"
_SEPARATE = "prefill runs on separate workers"
_DEVICES = "see --prefill and --decode"
_FIXED = "the limit is fixed, see docs/http.md"
_NO_ADDRESSES = "ranks need no address here; those on other machines dial rank_listen, see docs/parallel.md"
_ALL_TRACED = tuple(f"{role}.otlp_endpoint" for role in ("router", *_WORKERS, "gateway"))


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
    Knob("option.served_model_name", ("up.name",)),
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
        convert=quantization,
    ),
    Knob(
        "option.kv_cache_dtype",
        _workers("kv_dtype"),
        env=("KV_CACHE_DTYPE", "KV_DTYPE"),
        also=("option.kv_dtype",),
        convert=kv_dtype,
    ),
    Knob("option.save_mp_checkpoint_path", ("up.partition",), is_file=True),
    Knob("option.load_format", _workers("load_format"), convert=load_format),
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
    Knob("option.tokenizer_config_path", env=("TOKENIZER_CONFIG_PATH",), note=_TOKENIZER),
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
    Knob("option.lora_adapters", _workers("adapter"), env=("LORA_ADAPTERS",), also=("option.lora_modules",)),
    Knob("option.max_loras", note="all adapters in memory may be in one batch"),
    Knob("option.max_cpu_loras", _workers("max_loaded_adapters")),
    Knob("option.lora_extra_vocab_size", note="adapters do not extend the vocabulary"),
    Knob("option.cpu_offload_gb_per_gpu", also=("option.cpu_offload_gb",), note="weights are never moved to the host"),
    Knob("option.swap_space", note="a sequence that has lost its KV is computed again"),
    Knob("option.max_seq_len_to_capture", note="see --cuda-graphs"),
    Knob("option.distributed_executor_backend", note="a worker starts its ranks itself"),
    Knob("option.guided_decoding_backend", note="there is one, llguidance"),
    Knob("option.seed", note="set it per request"),
    Knob("option.tokenizer_mode", note=_TOKENIZER),
    Knob("option.chat_template", note="the chat template of the checkpoint is used"),
    Knob("option.disable_log_stats", also=("option.disable_log_requests",), note="see --log-level"),
    Knob("option.speculative_config", spread=speculation),
    Knob("option.speculative_draft_model", ("decode.draft_model",), also=("option.draft_model_id",)),
    Knob(
        "option.speculative_length",
        ("decode.num_speculative_tokens",),
        env=("SPECULATE",),
        also=("option.spec_length",),
    ),
    Knob("option.draft_model_tp_size", convert=one_draft_rank, note=ONE_DRAFT_RANK),
    Knob("option.record_acceptance_rate", note="always recorded"),
    Knob("option.bedrock_compat", convert=off_only, note="always off"),
)

SECRET_VARIABLES = frozenset(
    name for knob in KNOBS if knob.is_secret for name in (knob.key.replace("option.", "OPTION_").upper(), *knob.env)
)
"""Variables with secrets."""


def knob_of(option: str) -> Knob | None:
    """The row that has an option of vLLM or TGI, such as --max-num-seqs."""
    name = option.removeprefix("--").replace("-", "_")
    for knob in KNOBS:
        if f"option.{name}" in (knob.key, *knob.also) or name.upper() in knob.env:
            return knob
    return None
