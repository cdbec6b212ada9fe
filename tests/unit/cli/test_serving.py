"""serving.properties, OPTION_*, and the variables of TGI and SageMaker."""

from pathlib import Path

import pytest

from mesh.domain.errors import ConfigurationError
from tandem_cli.configuration.low_code import LowCode, read_low_code
from tandem_cli.configuration.low_code_keys import KNOBS
from tandem_cli.configuration.up_settings import UpSettings, passed_on, roles_of

PROPERTIES = r"""
# a model of LMI
engine=MPI
option.model_id = /models/llama
option.rolling_batch: auto
option.dtype=fp16
option.max_rolling_batch_size=16
option.max_model_len \
    = 2048
option.tensor_parallel_degree=max
option.block_size=8
option.nobody_knows=1
job_queue_size=50
"""


def read(tmp_path: Path, properties: str = "", **environ: str) -> LowCode:
    path = tmp_path / "serving.properties"
    path.write_text(properties)
    return read_low_code(str(path), environ, roles_of())


def test_a_file_configures_the_whole_mesh(tmp_path: Path) -> None:
    found = read(tmp_path, PROPERTIES)
    assert found.of("up") == {"model": "/models/llama"}
    workers = {"tensor_parallel": "max", "dtype": "float16", "max_model_len": "2048", "block_size": "8"}
    assert found.of("prefill") == workers
    assert found.of("decode") == workers | {"max_rolling_batch_size": "16"}
    assert found.of("router") == {"max_concurrent_requests": "50", "max_queued_requests": "50"}
    assert "option.dtype=fp16 (serving.properties): decode.dtype = float16" in found.lines
    warned = "\n".join(found.warnings)
    assert "option.rolling_batch=auto (serving.properties) has no effect: batching is always continuous" in warned
    assert "option.nobody_knows (serving.properties) is not known" in warned


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffoption.model_id=/models/llama").of("up") == {"model": "/models/llama"}


def test_who_wins(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "option.dtype=fp32",
        OPTION_DTYPE="bf16",
        OPTION_MAX_ROLLING_BATCH_SIZE="9",
        MAX_BATCH_SIZE="5",
        DTYPE="fp16",
        QUANTIZE="int8",
        OPTION_LOAD_FORMAT="",
        LOAD_FORMAT="dummy",
        OPTION_TGI_COMPAT="true",
        TANDEM_QUANTIZE="none",
    )
    assert found.of("decode") == {"dtype": "float32", "max_rolling_batch_size": "9"}
    assert found.of("gateway") == {"tgi_compat": "true"}
    assert any(line.endswith("decode.quantize stays as TANDEM_QUANTIZE has it") for line in found.lines)


def test_variables_of_tgi_and_sagemaker() -> None:
    environ = {
        "HF_MODEL_ID": "/opt/ml/model",
        "SM_NUM_GPUS": "1",
        "MAX_INPUT_TOKENS": "100",
        "MAX_TOTAL_TOKENS": "200",
        "MAX_BATCH_PREFILL_TOKENS": "300",
        "MAX_BATCH_TOTAL_TOKENS": "4000",
        "WAITING_SERVED_RATIO": "1.2",
        "SAGEMAKER_MAX_PAYLOAD_IN_MB": "2",
        "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS": "60",
    }
    found = read_low_code(None, environ, roles_of())
    assert found.of("up") == {"model": "/opt/ml/model"}
    assert found.of("router") == {"max_input_length": "100", "max_total_tokens": "200"}
    assert found.of("prefill") == {"tensor_parallel": "1", "max_batch_prefill_tokens": "300"}
    assert found.of("decode") == {"tensor_parallel": "1", "max_batch_total_tokens": "4000"}
    assert found.of("gateway") == {"max_body_bytes": str(2 << 20), "request_timeout_s": "60"}
    assert any("WAITING_SERVED_RATIO=1.2" in warning for warning in found.warnings)


def test_the_compiled_decoder_and_the_type_of_kv_are_the_workers(tmp_path: Path) -> None:
    found = read(tmp_path, "option.enforce_eager=true", KV_CACHE_DTYPE="bf16")
    assert found.of("prefill") == found.of("decode") == {"enforce_eager": "true", "kv_dtype": "bfloat16"}
    assert "KV_CACHE_DTYPE=bf16 (KV_CACHE_DTYPE): decode.kv_dtype = bfloat16" in found.lines
    assert read(tmp_path, ENFORCE_EAGER="1").of("decode") == {"enforce_eager": "1"}
    for name in ("fp8", "fp8_e4m3", "FP8_E4M3FN"):
        assert read(tmp_path, f"option.kv_cache_dtype={name}").of("decode") == {"kv_dtype": "fp8"}


@pytest.mark.parametrize(
    ("properties", "environ", "sizes"),
    [
        ("option.cuda_graphs=1,2,4", {}, "1,2,4"),
        ("", {"CUDA_GRAPHS": "0"}, "0"),
        ("", {"ENABLE_CUDA_GRAPHS": "false"}, "0"),
        ("option.enable_cuda_graphs=true", {}, "auto"),
        ("", {"ENABLE_CUDA_GRAPHS": "true", "CUDA_GRAPHS": "1,8"}, "1,8"),
    ],
)
def test_cuda_graphs_are_the_decode_workers(
    tmp_path: Path, properties: str, environ: dict[str, str], sizes: str
) -> None:
    found = read(tmp_path, properties, **environ)
    assert (found.of("decode"), found.of("prefill")) == ({"cuda_graphs": sizes}, {})
    assert not found.warnings


@pytest.mark.parametrize(
    "name",
    [
        "MAX_BEST_OF",
        "MAX_STOP_SEQUENCES",
        "MAX_TOP_N_TOKENS",
        "SERVING_BATCH_SIZE",
        "TGI_V1",
        "VALIDATION_WORKERS",
        "MASTER_ADDR",
        "MASTER_PORT",
        "SHARD_UDS_PATH",
        "USAGE_STATS",
        "TOKENIZER_CONFIG_PATH",
        "ENABLE_PREFILL_LOGPROBS",
        "ATTENTION",
    ],
)
def test_variables_without_effect_are_warned_about(tmp_path: Path, name: str) -> None:
    (warning,) = read(tmp_path, **{name: "1"}).warnings
    assert warning.startswith(f"{name}=1 ({name}) has no effect: ")


def test_lmis_own_variables_that_are_not_known_are_warned_about(tmp_path: Path) -> None:
    assert read(tmp_path, SERVING_LOAD_MODELS="all").warnings == [
        "SERVING_LOAD_MODELS is not known here and has no effect"
    ]


MEMBERS = ("router", "prefill", "decode")


@pytest.mark.parametrize(
    ("properties", "environ", "name", "value", "roles"),
    [
        ("option.gpu_memory_utilization=0.9", {}, "memory_utilization", "0.9", ("prefill", "decode")),
        ("", {"CUDA_MEMORY_FRACTION": "0.8"}, "memory_utilization", "0.8", ("prefill", "decode")),
        ("option.max_seq_len=512", {}, "max_model_len", "512", ("prefill", "decode")),
        ("", {"OPTION_MAX_MODEL_LEN": "512"}, "max_model_len", "512", ("prefill", "decode")),
        ("option.rope_theta=1e6", {}, "rope_theta", "1e6", MEMBERS),
        (
            'option.rope_scaling={"type":"linear","factor":2}',
            {},
            "rope_scaling",
            '{"type":"linear","factor":2}',
            MEMBERS,
        ),
        ("", {"ROPE_FACTOR": "2"}, "rope_scaling", '{"rope_type": "linear", "factor": 2.0}', MEMBERS),
        ("", {"ROPE_SCALING": "yarn"}, "rope_scaling", '{"rope_type": "yarn", "factor": 1.0}', MEMBERS),
        ("", {"GRACEFUL_TERMINATION_TIMEOUT": "90"}, "grace_s", "90", ("router", "gateway")),
        ("", {"PROMETHEUS_PORT": "9000"}, "metrics_port", "9000", ("up",)),
        ("", {"OTLP_ENDPOINT": "http://c:4317"}, "otlp_endpoint", "http://c:4317", (*MEMBERS, "gateway")),
        ("", {"PREFIX_CACHING": "false"}, "prefix_caching", "false", ("prefill", "decode")),
        ("option.tensor_parallel_degree=4", {}, "tensor_parallel", "4", ("prefill", "decode")),
        ("option.tensor_parallel_size=max", {}, "tensor_parallel", "max", ("prefill", "decode")),
        ("", {"TENSOR_PARALLEL_DEGREE": "2"}, "tensor_parallel", "2", ("prefill", "decode")),
        ("", {"SM_NUM_GPUS": "2"}, "tensor_parallel", "2", ("prefill", "decode")),
        ("", {"SM_NUM_GPUS": "0"}, "tensor_parallel", "1", ("prefill", "decode")),
        ("", {"NUM_SHARD": "2"}, "tensor_parallel", "2", ("prefill", "decode")),
        ("option.pipeline_parallel_degree=2", {}, "pipeline_parallel", "2", ("prefill", "decode")),
        ("option.pipeline_parallel_size=max", {}, "pipeline_parallel", "max", ("prefill", "decode")),
        ("", {"PIPELINE_PARALLEL_DEGREE": "2"}, "pipeline_parallel", "2", ("prefill", "decode")),
        ("", {"SHARDED": "true"}, "tensor_parallel", "max", ("prefill", "decode")),
        ("", {"SHARDED": "false"}, "tensor_parallel", "1", ("prefill", "decode")),
        ("", {"OPTION_SAVE_MP_CHECKPOINT_PATH": "/opt/out"}, "partition", "/opt/out", ("up",)),
        ("option.load_format=safetensors", {}, "load_format", "auto", ("prefill", "decode")),
        ("option.quantize=awq", {}, "quantize", "none", ("prefill", "decode")),
        ("", {"QUANTIZE": "gptq"}, "quantize", "none", ("prefill", "decode")),
        ("option.quantization=int8", {}, "quantize", "int8", ("prefill", "decode")),
        ("option.max_num_seqs=7", {}, "max_rolling_batch_size", "7", ("decode",)),
        ("", {"OPTION_MAX_ROLLING_BATCH_SIZE": "7"}, "max_rolling_batch_size", "7", ("decode",)),
        ("option.max_num_batched_tokens=7", {}, "max_batch_prefill_tokens", "7", ("prefill",)),
        ("", {"OPTION_SERVED_MODEL_NAME": "m"}, "name", "m", ("up",)),
        ("option.reasoning_parser=deepseek_r1", {}, "reasoning_parser", "deepseek_r1", ("gateway",)),
        ("option.s3url=s3://b/flan/", {}, "model", "s3://b/flan/", ("up",)),
    ],
)
def test_mappings(
    tmp_path: Path, properties: str, environ: dict[str, str], name: str, value: str, roles: tuple[str, ...]
) -> None:
    found = read(tmp_path, properties, **environ)
    assert found.warnings == []
    assert {role: values for role, values in found.values.items() if values} == {role: {name: value} for role in roles}
    (named,) = {origins[name] for origins in found.origins.values()}
    assert next(iter(environ), properties.partition("=")[0]) in named


def test_a_degree_wins_over_sharded() -> None:
    found = read_low_code(None, {"SHARDED": "true", "NUM_SHARD": "2"}, roles_of())
    assert found.of("prefill") == found.of("decode") == {"tensor_parallel": "2"}
    assert found.origins["decode"] == {"tensor_parallel": "NUM_SHARD"}


def test_adapters_are_the_workers(tmp_path: Path) -> None:
    found = read(
        tmp_path,
        "option.enable_lora=true\noption.adapters=mine\noption.max_lora_rank=32\noption.max_loras=4\noption.max_cpu_loras=8",
    )
    wanted = {"adapter": str(tmp_path / "mine"), "max_lora_rank": "32", "max_loaded_adapters": "8"}
    assert found.of("prefill") == found.of("decode") == wanted
    assert [warning.partition(" ")[0] for warning in found.warnings] == [
        "option.enable_lora=true",
        "option.max_loras=4",
    ]
    assert read(tmp_path, LORA_ADAPTERS="a=/x,b=/y").of("decode") == {"adapter": "a=/x,b=/y"}


def test_a_key_is_never_shown(tmp_path: Path) -> None:
    found = read(tmp_path, API_KEY="tgi-secret")
    assert found.warnings == ["API_KEY=*** (API_KEY) has no effect: keys are in a file, see --api-keys-file"]


@pytest.mark.parametrize("name", ["awq", "auto-round", "bitnet", "hqq", "modelopt", "mxfp4", "quark", "torchao"])
def test_formats_of_checkpoints_may_be_named(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, f"option.quantize={name}").of("prefill") == read(tmp_path, "option.quantize=none").of(
        "prefill"
    )


@pytest.mark.parametrize(
    ("properties", "environ", "said"),
    [
        ("option.tensor_parallel_degree=1\noption.tensor_parallel_size=2", {}, "contradict each other"),
        ("option.draft_model_tp_size=2", {}, "one process of a worker runs the draft model: expected 1, got '2'"),
        ("option.async_mode=true\noption.rolling_batch=vllm", {}, "option.rolling_batch=disable"),
        ("option.output_formatter=3p", {}, "jsonlines"),
        ("option.dtype=int8", {}, "option.quantize=int8"),
        ("", {"KV_CACHE_DTYPE": "fp8_e5m2"}, "KV in fp8_e5m2 is not supported: use fp8, which is e4m3"),
        ("option.quantize=bitsandbytes", {}, "this is not supported: use int8 or int4"),
        ("option.max_num_seqs=4\noption.max_rolling_batch_size=5", {}, "contradict each other"),
        ("", {"MAX_INPUT_TOKENS": "1", "MAX_INPUT_LENGTH": "2"}, "contradict each other"),
        ("", {"MAX_INPUT_TOKENS": "9", "MAX_TOTAL_TOKENS": "9"}, "`max_input_tokens` must be < `max_total_tokens`"),
        (
            "",
            {"MAX_BATCH_PREFILL_TOKENS": "9", "MAX_BATCH_TOTAL_TOKENS": "8"},
            "`max_batch_prefill_tokens` must be <= `max_batch_total_tokens`. Given: 9 and 8",
        ),
        ("", {"MAX_TOTAL_TOKENS": "9", "MAX_BATCH_TOTAL_TOKENS": "8"}, "`max_total_tokens` must be <="),
        ("option.a=\\u12", {}, "cannot read"),
        ("", {"SHARDED": "false", "NUM_SHARD": "2"}, "SHARDED=false and NUM_SHARD=2 contradict each other"),
        ("", {"ROPE_SCALING": "linear", "ROPE_FACTOR": "x"}, "ROPE_FACTOR: expected a number, got 'x'"),
        ("", {"SAGEMAKER_MAX_PAYLOAD_IN_MB": "nan"}, "expected a number, got 'nan'"),
        ("max_payload_in_mb=inf", {}, "expected a number, got 'inf'"),
        ("option.max_seq_len=5\noption.max_model_len=6", {}, "contradict each other"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, properties: str, environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read(tmp_path, properties, **environ)
    assert said in str(caught.value)


def test_the_table_means_settings_that_exist() -> None:
    settings = passed_on()
    for knob in KNOBS:
        for target in knob.targets:
            role, _, name = target.partition(".")
            known = UpSettings.__dataclass_fields__ if role == "up" else settings
            assert name in known, target
            assert role == "up" or role in roles_of()[name], target


@pytest.mark.parametrize(
    ("properties", "environ", "decode"),
    [
        (
            'option.speculative_config={"model": "/models/small", "num_speculative_tokens": 5}',
            {},
            {"speculative": "draft", "draft_model": "/models/small", "num_speculative_tokens": "5"},
        ),
        (
            'option.speculative_config={"method": "ngram", "num_speculative_tokens": 3}',
            {},
            {"speculative": "ngram", "num_speculative_tokens": "3"},
        ),
        ('option.speculative_config={"method": "qwen3_next_mtp"}', {}, {"speculative": "mtp"}),
        (
            "option.speculative_draft_model=/models/small\noption.speculative_length=4",
            {},
            {"draft_model": "/models/small", "num_speculative_tokens": "4"},
        ),
        ("", {"SPECULATE": "2"}, {"num_speculative_tokens": "2"}),
    ],
)
def test_speculation(tmp_path: Path, properties: str, environ: dict[str, str], decode: dict[str, str]) -> None:
    assert read(tmp_path, properties, **environ).of("decode") == decode


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("5", "JSON object"),
        ("{", "JSON object"),
        ('{"method": "medusa"}', "method must be ngram, mtp or draft_model, got 'medusa'"),
        ('{"model": "m", "draft_tensor_parallel_size": 2}', "not supported: draft_tensor_parallel_size"),
    ],
)
def test_speculation_that_does_not_exist_here(tmp_path: Path, value: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read(tmp_path, f"option.speculative_config={value}")


def test_keys_are_properties_of_a_handler(tmp_path: Path) -> None:
    given = "engine=Python\noption.entryPoint=model.py\noption.my_key=1\noption.dtype=fp16\nmy.own=2"
    found = read(tmp_path, given, OPTION_MY_KEY="0", HF_MODEL_ID="/models/llama", API_KEY="tgi-secret")
    assert found.properties == {
        "engine": "Python",
        "entryPoint": "model.py",
        "my_key": "1",
        "dtype": "fp16",
        "my.own": "2",
        "model_id": "/models/llama",
    }
    assert "option.my_key (serving.properties) is for the handler" in found.lines
    assert "my.own (serving.properties) is for the handler" in found.lines
    assert not any("my_key" in warning for warning in found.warnings)


def test_a_secret_key_is_no_property_of_a_handler(tmp_path: Path) -> None:
    assert read(tmp_path, "option.entryPoint=model.py\noption.api_key=hunter2").properties == {"entryPoint": "model.py"}
    environ = {"OPTION_API_KEY": "hunter2", "OPTION_MY_KEY": "1"}
    assert read_low_code(None, environ, roles_of(), has_handler=True).properties == {"my_key": "1"}


def test_unknown_keys_of_a_handler_that_is_named_elsewhere() -> None:
    environ = {"OPTION_MY_KEY": "1"}
    assert read_low_code(None, environ, roles_of(), has_handler=True).warnings == []
    (warning,) = read_low_code(None, environ, roles_of()).warnings
    assert warning == "option.my_key (OPTION_MY_KEY) is not known here and has no effect"


def test_lmis_queue_is_for_lmis_configuration(tmp_path: Path) -> None:
    lmi = {"max_concurrent_requests": "1000", "max_queued_requests": "1000"}
    assert read(tmp_path).router_defaults == lmi
    assert read_low_code(None, {"OPTION_DTYPE": "fp32"}, roles_of()).router_defaults == lmi
    assert read_low_code(None, {"DTYPE": "fp32"}, roles_of()).router_defaults == {}
    assert read(tmp_path, "option.tgi_compat=true").router_defaults == {}


def test_the_handler_of_a_file_lies_beside_it(tmp_path: Path) -> None:
    assert read(tmp_path, "option.entryPoint=model.py").of("gateway") == {"handler": str(tmp_path / "model.py")}
    assert read(tmp_path, "option.entryPoint=/a/model.py").of("gateway") == {"handler": "/a/model.py"}
    assert read(tmp_path, "option.entryPoint=djl_python.huggingface").of("gateway") == {"handler": ""}
    assert read(tmp_path, OPTION_ENTRYPOINT="model.py").of("gateway") == {"handler": "model.py"}
