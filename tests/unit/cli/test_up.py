"""What `tandem up` is about to start, by its flags, files and variables: nothing is started."""

import asyncio
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from checkpoint.partition_manifest import MANIFEST, VERSION
from gateway.handler.__main__ import HandlerSettings
from mesh.domain.errors import ConfigurationError
from mesh.rpc.probe import ProbeSettings
from mesh.settings import near_name
from rank_worker.settings import RankSettings
from switchable_worker.settings import SwitchableSettings
from tandem_cli.configuration.up_settings import REPLACED, ROLES, UpSettings, all_names, check_names
from tandem_cli.local_mesh import supervisor as supervisor_module
from tandem_cli.local_mesh.deployment import Deployment
from tandem_cli.local_mesh.display import Display
from tandem_cli.local_mesh.launcher import LocalLauncher
from tandem_cli.local_mesh.ports import NO_GRPC_PROXY, NO_PROXY, reach_directly
from tandem_cli.local_mesh.supervisor import MeshFailed, Supervisor, _TrialEnded
from tandem_cli.local_mesh.trial import Trial
from tandem_cli.main import main
from tests.defects import Repaired
from tests.fakes.sdk_router import running_router

Prepared = Callable[..., tuple[Deployment, LocalLauncher]]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """The deployment and the launcher of `tandem up` with these flags."""
    found: list[tuple[Deployment, LocalLauncher]] = []

    class Recorder:
        def __init__(
            self, deployment: Deployment, launcher: LocalLauncher, display: Display, trial: Trial, *_: None
        ) -> None:
            found.append((deployment, launcher))

        async def run(self, on_ready: Callable[[str, str], None]) -> None:
            """Start nothing."""

    monkeypatch.setattr("tandem_cli.up.Supervisor", Recorder)

    def run(*flags: str) -> tuple[Deployment, LocalLauncher]:
        assert main(["up", "--port", "0", *flags]) == 0
        return found[-1]

    return run


def refusal(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """The line on stderr with which `tandem up` refuses these flags."""
    assert main(["up", *flags]) == 2
    return capsys.readouterr().err.splitlines()[-1]


def write_properties(folder: Path, text: str) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "serving.properties").write_text(text)
    return str(folder / "serving.properties")


SEED = "engine=MPI\noption.rolling_batch=auto\noption.max_rolling_batch_size=4\n"


def test_properties_without_a_model_mean_their_own_folder(
    tmp_path: Path, prepared: Prepared, capsys: pytest.CaptureFixture[str], repaired: Repaired
) -> None:
    path = write_properties(tmp_path / "flan", SEED)
    assert "flan/serving.properties names no model: set option.model_id" in refusal(
        capsys, "--serving-properties", path, "--http-port", "0"
    )
    (tmp_path / "flan" / "config.json").write_text("{}")
    deployment, _ = prepared("--serving-properties", path, "--http-port", "0")
    assert deployment.models[0].folder == str(tmp_path / "flan")
    assert deployment.models[0].name == "flan"
    repaired("M1", "the checkpoint beside it, else refused in words")


def test_lmis_port_is_a_default_only(tmp_path: Path, prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_properties(tmp_path / "flan", SEED)
    (tmp_path / "flan" / "config.json").write_text("{}")
    config = tmp_path / "own.toml"
    config.write_text("[up]\nhttp_port = 0\n")
    deployment, _ = prepared("--serving-properties", path, "--config", str(config))
    assert deployment.settings.http_port == 0
    monkeypatch.setenv("TANDEM_HTTP_PORT", "0")
    deployment, _ = prepared("--serving-properties", path)
    assert deployment.settings.http_port == 0
    monkeypatch.delenv("TANDEM_HTTP_PORT")
    deployment, _ = prepared("--serving-properties", path, "--no-http")
    assert deployment.settings.http_port is None


@pytest.mark.parametrize("key", ["option.model_id", "option.s3url"])
def test_a_model_that_a_key_names_wins_over_the_folder(tmp_path: Path, prepared: Prepared, key: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    path = write_properties(tmp_path / "flan", f"{SEED}{key}={tmp_path}/other\n")
    (tmp_path / "flan" / "config.json").write_text("{}")
    deployment, _ = prepared("--serving-properties", path, "--http-port", "0")
    assert deployment.models[0].folder == f"{tmp_path}/other"
    deployment, _ = prepared("--serving-properties", path, "--http-port", "0", "--model", f"{tmp_path}/flan")
    assert deployment.models[0].folder == f"{tmp_path}/flan"


def test_two_names_of_the_model_that_differ_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_properties(tmp_path, "option.model_id=a/b\noption.s3url=s3://c/d\n")
    assert "contradict each other" in refusal(capsys, "--serving-properties", path)


def test_a_settings_file_names_the_model(tmp_path: Path, prepared: Prepared) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "own.toml").write_text('model = "tandem-small"\n')
    path = write_properties(tmp_path, SEED)
    deployment, _ = prepared("--serving-properties", path, "--http-port", "0", "--config", str(tmp_path / "own.toml"))
    assert deployment.models[0].name == "tandem-small"


def test_options_without_a_model_say_what_is_served(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPTION_MAX_ROLLING_BATCH_SIZE", "9")
    prepared()
    assert "serving the bundled tandem-small" in capsys.readouterr().err


def test_a_handler_finds_the_models_files(tmp_path: Path, prepared: Prepared, repaired: Repaired) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.py").write_text("def handle(inputs): ...")
    path = write_properties(tmp_path, "option.entryPoint=model.py\noption.model_id=tandem-small\noption.mine=1\n")
    deployment, launcher = prepared("--serving-properties", path, "--http-port", "0")
    properties = json.loads(launcher.environ["TANDEM_HANDLER_PROPERTIES"])
    assert properties["mine"] == "1"
    assert properties["model_id"] == deployment.models[0].folder
    assert (Path(properties["model_id"]) / "tokenizer.json").is_file()
    repaired("M16", "a handler's model_id is the model's folder, with its tokenizer")


TYPOS = [
    ("max_roling_batch_size = 3", "unknown key max_roling_batch_size; did you mean max_rolling_batch_size?"),
    ("[decode_worker]\nmax_roling_batch_size = 3", "in [decode_worker]; did you mean max_rolling_batch_size?"),
    ("[decode]\nmax_roling_batch_size = 3", "in [decode]; did you mean max_rolling_batch_size?"),
    ("[decode_workers]\nblock_size = 8", "unknown table [decode_workers]; did you mean decode_worker?"),
    ("[gateway]\nhandlers = 1", "unknown key handlers in [gateway]; did you mean handler?"),
    ("nobody_knows = 1", "unknown key nobody_knows"),
    ("[decode]\nblock_size = 8\n[decode_worker]\nblock_size = 4", "block_size in [decode_worker] and in [decode]"),
    ("up = 3", "unknown key up"),
]


@pytest.mark.parametrize(("text", "said"), TYPOS)
def test_typing_errors_of_a_settings_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    (tmp_path / "own.toml").write_text(text)
    assert said in refusal(capsys, "--config", str(tmp_path / "own.toml"))


def test_tables_may_have_the_names_of_roles(tmp_path: Path, prepared: Prepared, repaired: Repaired) -> None:
    (tmp_path / "own.toml").write_text(
        'prefill = 2\nlog_level = "error"\n[decode]\nmax_rolling_batch_size = 5\n[prefill_worker]\nblock_size = 8\n'
    )
    deployment, launcher = prepared("--config", str(tmp_path / "own.toml"))
    workers = [deployment.resolve(worker, launcher.environ) for worker in deployment.workers("127.0.0.1:1")]
    assert [worker.block_size for worker in workers] == [8, 8, 16]
    assert workers[-1].max_rolling_batch_size == 5
    assert {worker.log_level for worker in workers} == {"error"}
    repaired("M6", f"{len(TYPOS)} kinds of errors refused, 'did you mean'; [decode] is [decode_worker]")


SET_BY_UP = [
    ('[router]\nhost = "0.0.0.0"', "has host in [router]", "`tandem up` has --host for that, or host in [up]"),
    ("[router]\nport = 6000", "has port in [router]", "--port"),
    ('[router]\nmodel = "/m"', "has model in [router]", "--model"),
    ("[router]\nregistry_port = 1", "has registry_port in [router]", "`tandem up` sets it itself"),
    ("[gateway]\nport = 9000", "has port in [gateway]", "--http-port for that, or http_port in [up]"),
    ("[decode_worker]\nnum_threads = 3", "has num_threads in [decode_worker]", "--threads-per-worker"),
    ("[decode]\nnum_threads = 3", "has num_threads in [decode_worker]", "--threads-per-worker"),
    ('[prefill]\nmodel = "/m"', "has model in [prefill_worker]", "--model"),
    ("num_threads = 3", "has num_threads, which has no effect", "--threads-per-worker"),
]


@pytest.mark.parametrize(("text", "said", "instead"), SET_BY_UP)
def test_settings_that_up_sets_itself_are_refused_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str, instead: str, repaired: Repaired
) -> None:
    (tmp_path / "own.toml").write_text(text)
    line = refusal(capsys, "--config", str(tmp_path / "own.toml"))
    assert said in line
    assert instead in line
    repaired("D23", "refused, with the option to use")


def test_settings_that_up_sets_itself_are_refused_in_variables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], repaired: Repaired
) -> None:
    monkeypatch.setenv("TANDEM_REGISTRY_PORT", "6001")
    assert refusal(capsys) == "tandem: TANDEM_REGISTRY_PORT has no effect: `tandem up` sets it itself"
    monkeypatch.delenv("TANDEM_REGISTRY_PORT")
    monkeypatch.setenv("TANDEM_NUM_THREADS", "3")
    assert "TANDEM_NUM_THREADS has no effect: `tandem up` has --threads-per-worker" in refusal(capsys)
    repaired("D23", "refused, with the option to use")


def test_no_other_setting_is_replaced_without_a_word(prepared: Prepared, tmp_path: Path) -> None:
    """Each flag of a service that nobody has asked for is refused elsewhere, or gives way."""
    (tmp_path / "own.toml").write_text('host = "127.0.0.1"\nport = 0\nname = "mine"\n[decode]\nkv_memory_shares = 3\n')
    deployment, launcher = prepared("--http-port", "0", "--config", str(tmp_path / "own.toml"))
    router = deployment.resolve(deployment.router(), launcher.environ)
    gateway = deployment.gateway(["127.0.0.1:1"], router)
    assert gateway is not None
    for service in (deployment.router(), *deployment.workers("127.0.0.1:1"), gateway):
        component, _ = ROLES[service.role]
        flags = {flag.partition("=")[0][2:].replace("-", "_") for flag in service.flags}
        assert flags - {"config", "follow_stdin", "kv_memory_shares"} <= REPLACED[component].keys()
    decode = deployment.workers("127.0.0.1:1")[-1]
    assert deployment.resolve(decode, launcher.environ).kv_memory_shares == 3


def test_wrong_names_elsewhere(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, "--set", "decode.max_roling_batch_size=3").endswith("did you mean max_rolling_batch_size?")
    monkeypatch.setenv("TANDEM_MAX_ROLING_BATCH_SIZE", "3")
    assert refusal(capsys).endswith("did you mean TANDEM_MAX_ROLLING_BATCH_SIZE?")


@pytest.mark.parametrize("flags", [(), ("--colocated",), ("--switchable",)])
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("PREFIL", "PREFILL"),
        ("MAX_BATCH_PREFIL_TOKENS", "MAX_BATCH_PREFILL_TOKENS"),
        ("DISABLE_GRAMAR_SUPPORT", "DISABLE_GRAMMAR_SUPPORT"),
        ("REQUEST_TIMEOUTS_S", "REQUEST_TIMEOUT_S"),
    ],
)
def test_misspelt_variables_are_refused_before_anything_else_is_said(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    wrong: str,
    right: str,
    flags: tuple[str, ...],
) -> None:
    """Also those of a service that is not started."""
    monkeypatch.setenv("TANDEM_NOBODY", "1")
    monkeypatch.setenv("OPTION_MY_KEY", "1")
    monkeypatch.setenv(f"TANDEM_{wrong}", "1")
    assert main(["up", *flags]) == 2
    assert capsys.readouterr().err == f"tandem: TANDEM_{wrong} is unknown: did you mean TANDEM_{right}?\n"


def test_variables_that_nobody_reads_are_warned_about() -> None:
    """Not those that Kubernetes sets for a service of our name."""
    environ = {"TANDEM_NOBODY": "1", "TANDEM_SERVICE_HOST": "10.0.0.1", "TANDEM_PORT_50051_TCP_ADDR": "10.0.0.1"}
    environ |= {"TANDEM_MESH_KEY": "k", "TANDEM_API_KEY": "k", "TANDEM_ROUTER_SERVICE_PORT": "1", "OTHER": "1"}
    assert check_names(None, environ) == ["TANDEM_NOBODY is not known and has no effect"]
    assert check_names(None, {"TANDEM_MAX_NUM_SEQS": "8"}) == [
        "TANDEM_MAX_NUM_SEQS is not known and has no effect; here it is TANDEM_MAX_ROLLING_BATCH_SIZE"
    ]
    assert check_names(None, {"TANDEM_SERVING_PROPERTIES": "p"}) == [
        "TANDEM_SERVING_PROPERTIES has no effect: --serving-properties is a flag only"
    ]


def test_no_two_settings_look_like_typing_errors_of_each_other() -> None:
    """A component and `tandem up` refuse names close to its own: another component's must not be."""
    classes = (HandlerSettings, ProbeSettings, RankSettings, SwitchableSettings)
    others = [each.name for cls in classes for each in fields(cls)]
    names = sorted({name for own in all_names().values() for name in own} | set(others))
    close = [(one, other) for one, other in combinations(names, 2) if near_name(one, [other])]
    assert close == []


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"MAX_CONCURRENT_REQUESTS": "many"}, "must be int, got 'many' (from MAX_CONCURRENT_REQUESTS)"),
        ({"OPTION_MAX_ROLLING_BATCH_SIZE": "x"}, "from option.max_rolling_batch_size (OPTION_MAX_ROLLING_BATCH_SIZE)"),
        ({"CUDA_MEMORY_FRACTION": "1.5"}, "memory_utilization from CUDA_MEMORY_FRACTION"),
        ({"MODEL_LOADING_TIMEOUT": "-1"}, "model_loading_timeout from MODEL_LOADING_TIMEOUT"),
    ],
)
def test_a_wrong_value_is_blamed_on_what_the_user_has_set(
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    repaired: Repaired,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert said in refusal(capsys)
    repaired("F14", "a wrong value is blamed on the variable or key that has it")


def test_a_flag_that_wins_is_blamed_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MAX_CONCURRENT_REQUESTS", "5")
    assert "(from --set decode.max-rolling-batch-size)" in refusal(capsys, "--set", "decode.max-rolling-batch-size=x")
    said = refusal(capsys, "--max-concurrent-requests", "many")
    assert "max_concurrent_requests must be int, got 'many' (from flag --max-concurrent-requests)" in said


@pytest.mark.parametrize(
    ("flags", "shares"),
    [
        (("--prefill", "2", "--decode", "4"), {"6"}),
        (("--colocated",), {"1"}),
        (("--set", "decode.device=cuda:1", "--set", "prefill.device=cuda"), {"1"}),
        (("--device", "cuda", "--set", "decode.tensor_parallel=2", "--prefill", "2"), {"3"}),
        (("--device", "cuda:1", "--set", "decode.tensor_parallel=2", "--set", "prefill.device=cuda:2"), {"2"}),
        (("--set", "decode.device=cuda:0,cuda:3", "--set", "prefill.device=cuda:2"), {"1"}),
        (("--model", "a=tandem-small", "--model", "b=tandem-small"), {"4"}),
        (("--set", "decode.device=cpu"), {"2"}),  # the others, on auto, may be there too
        (("--kv-memory-shares", "9"), {"9"}),
    ],
)
def test_workers_are_told_with_how_many_they_share_memory(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], shares: set[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    deployment, launcher = prepared(*flags)
    workers: list[Any] = [deployment.resolve(worker, launcher.environ) for worker in deployment.workers("127.0.0.1:1")]
    assert {str(worker.kv_memory_shares) for worker in workers} == shares


@pytest.mark.parametrize(
    ("flags", "devices", "shares"),
    [
        (("--decode", "2"), ["cuda:0", "cuda:1", "cuda:2"], {1}),
        (("--decode", "3"), ["cuda:0", "cuda:1", "cuda:2", "cuda:0"], {1, 2}),
        (("--tensor-parallel", "2"), ["cuda:0", "cuda:0"], {2}),
        (("--set", "decode.device=cuda:2"), ["cuda:0", "cuda:2"], {1}),
        (("--switch-roles", "true", "--colocated", "false"), ["cuda:0", "cuda:1"], {1}),
    ],
)
def test_workers_that_ask_for_any_gpu_have_one_each(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], devices: list[str], shares: set[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    deployment, launcher = prepared("--device", "cuda", *flags)
    workers: list[Any] = [deployment.resolve(worker, launcher.environ) for worker in deployment.workers("127.0.0.1:1")]
    assert [worker.device for worker in workers] == devices
    assert {worker.kv_memory_shares for worker in workers} == shares


@pytest.mark.parametrize(
    ("flags", "environ", "ranks", "cores"),
    [
        ((), {}, ["1", "1"], [4, 4]),
        (("--tensor-parallel", "2"), {}, ["2", "2"], [4, 4]),
        (("--set", "prefill.tensor_parallel=3"), {}, ["3", "1"], [6, 2]),
        (("--tensor-parallel", "max"), {}, ["max", "max"], [4, 4]),
        (("--set", "prefill.pipeline_parallel=3"), {}, ["1", "1"], [6, 2]),
        (("--set", "decode.tensor_parallel=3", "--pipeline-parallel", "max"), {}, ["1", "3"], [2, 6]),
        ((), {"TANDEM_TENSOR_PARALLEL": "2"}, ["2", "2"], [4, 4]),
        ((), {"SM_NUM_GPUS": "2"}, ["2", "2"], [4, 4]),
        (("--set", "decode.tensor-parallel=1"), {"NUM_SHARD": "3"}, ["3", "1"], [6, 2]),
        (("--set", "decode.tensor-parallel=2", "--threads-per-worker", "3"), {}, ["1", "2"], [3, 3]),
        (
            ("--model", "a=tandem-small", "--model", "b=tandem-small", "--set", "b/decode.tensor-parallel=3"),
            {},
            ["1", "1", "1", "3"],
            [2, 1, 2, 3],
        ),
    ],
)
def test_workers_have_ranks_and_cores_for_them(
    prepared: Prepared,
    flags: tuple[str, ...],
    environ: dict[str, str],
    ranks: list[str],
    cores: list[int],
    monkeypatch: pytest.MonkeyPatch,
    repaired: Repaired,
) -> None:
    for module in ("up", "local_mesh.deployment"):
        monkeypatch.setattr(f"tandem_cli.{module}.available_cores", lambda: range(8))
    monkeypatch.setattr("worker.settings.num_numa_nodes", lambda: 2)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    deployment, launcher = prepared(*flags)
    workers = deployment.workers("127.0.0.1:1")
    settings: list[Any] = [deployment.resolve(worker, launcher.environ) for worker in workers]
    assert [each.tensor_parallel for each in settings] == ranks
    assert [len(worker.cores) for worker in workers] == [each.num_threads for each in settings] == cores
    pairs = zip(ranks[::2], ranks[1::2], strict=True)
    is_staged = any("pipeline_parallel=3" in flag for flag in flags)
    lends = [pair == ("1", "1") and not is_staged for pair in pairs for _ in pair]
    assert [bool(each.core_table) for each in settings] == lends
    repaired("F5", "tensor_parallel_degree=2, SM_NUM_GPUS=2: each worker has two ranks, with cores for both")


def test_the_ranks_of_a_partition_have_cores(
    prepared: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not known before the model is partitioned how many `max` are."""
    out = tmp_path / "out"

    def write(arguments: Sequence[str], python_path: str) -> str:
        files = [{"name": f"rank-{rank}-of-3.safetensors", "num_bytes": 1, "xxh3": ""} for rank in range(3)]
        manifest = {"version": VERSION, "weights_digest": "00", "quantize": "none", "dtype": "float32", "files": files}
        manifest["source"] = {}
        out.mkdir()
        (out / MANIFEST).write_text(json.dumps(manifest | {"tensor_parallel": 3, "pipeline_parallel": 1}))
        return ""

    monkeypatch.setattr("tandem_cli.local_mesh.preparation._run_partition", write)
    for module in ("up", "local_mesh.deployment"):
        monkeypatch.setattr(f"tandem_cli.{module}.available_cores", lambda: range(8))
    deployment, _ = prepared("--partition", str(out), "--tensor-parallel", "max")
    assert [len(worker.cores) for worker in deployment.workers("127.0.0.1:1")] == [3, 3]
    assert [deployment.models[0].cores.prefill_ranks, deployment.models[0].cores.decode_ranks] == [(3,), (3,)]


@pytest.mark.parametrize(
    ("flags", "environ", "said"),
    [
        (("--tensor-parallel", "0"), {}, "tensor_parallel from flag --tensor-parallel"),
        (("--set", "decode.tensor-parallel=two"), {}, "tensor_parallel from --set decode.tensor-parallel"),
        ((), {"NUM_SHARD": "-1"}, "tensor_parallel from NUM_SHARD"),
        (("--pipeline-parallel", "0"), {}, "pipeline_parallel from flag --pipeline-parallel"),
    ],
)
def test_a_wrong_degree_is_refused(
    flags: tuple[str, ...],
    environ: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    message = refusal(capsys, *flags)
    assert said in message
    assert "must be at least 1, or max" in message


@pytest.mark.parametrize(("host", "decode_host"), [("10.0.0.1", "10.0.0.1"), ("127.0.0.1", "127.0.0.1")])
def test_decode_workers_listen_where_ranks_of_prefill_workers_reach_them(
    prepared: Prepared, host: str, decode_host: str
) -> None:
    listen = ("--set", "prefill.tensor_parallel=2", "--set", f"prefill.rank_listen={host}:5", "--trust-fabric")
    deployment, launcher = prepared(*listen)
    workers: list[Any] = [deployment.resolve(each, launcher.environ) for each in deployment.workers("127.0.0.1:1")]
    assert [worker.host for worker in workers] == ["127.0.0.1", decode_host]


def test_ranks_of_prefill_workers_dial_an_address(capsys: pytest.CaptureFixture[str]) -> None:
    listen = ("--set", "prefill.tensor_parallel=2", "--set", "prefill.rank_listen=0.0.0.0:5", "--trust-fabric")
    assert "prefill.rank_listen must name an address of this machine, not 0.0.0.0" in refusal(capsys, *listen)


def test_adapters_are_the_workers(prepared: Prepared, capsys: pytest.CaptureFixture[str]) -> None:
    """The flag may be repeated, and the worker itself says what is wrong with it."""
    deployment, launcher = prepared("--adapter", "a=/x", "--adapter", "b=/y", "--max-lora-rank", "32")
    for worker in deployment.workers("127.0.0.1:1"):
        settings = deployment.resolve(worker, launcher.environ)
        assert (settings.adapter, settings.max_lora_rank) == ("a=/x,b=/y", 32)
    assert "two adapters are named a: /x and /y" in refusal(capsys, "--adapter", "a=/x", "--adapter", "a=/y")


def test_rope_of_tgi_and_lmi_reaches_workers_and_router(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, repaired: Repaired
) -> None:
    monkeypatch.setenv("ROPE_SCALING", "dynamic")
    monkeypatch.setenv("ROPE_FACTOR", "2.0")
    for flags, scaling, theta in (
        ((), {"rope_type": "dynamic", "factor": 2.0}, 0.0),
        (
            ("--serving-properties", write_properties(tmp_path, _ROPE), "--http-port", "0"),
            {"type": "linear", "factor": 4.0},
            1e6,
        ),
    ):
        deployment, launcher = prepared(*flags)
        for service in (deployment.router(), *deployment.workers("127.0.0.1:1")):
            settings = deployment.resolve(service, launcher.environ)
            assert json.loads(settings.rope_scaling) == scaling
            assert settings.rope_theta == theta
    repaired("M5", "option.rope_scaling and rope_theta, ROPE_SCALING and ROPE_FACTOR reach the router and all workers")


_ROPE = (
    'option.model_id=tandem-small\noption.rope_scaling={"type": "linear", "factor": 4.0}\noption.rope_theta=1000000\n'
)


def test_wrong_rope_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ROPE_FACTOR", "twice")
    assert "ROPE_FACTOR: expected a number, got 'twice'" in refusal(capsys)
    monkeypatch.setenv("ROPE_FACTOR", "-2")
    assert "rope_scaling: factor must be a number > 0" in refusal(capsys)


def test_a_config_error_says_its_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot read the settings file"):
        check_names(str(tmp_path / "none.toml"), {})


@pytest.mark.parametrize(
    ("warning", "failure", "is_kept"),
    [("", None, False), ("exited with status 1", None, True), ("", MeshFailed("a worker died"), True)],
)
def test_logs_are_kept_only_if_something_went_wrong(
    warning: str,
    failure: MeshFailed | None,
    is_kept: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    repaired: Repaired,
) -> None:
    class Mesh:
        def __init__(
            self, deployment: Deployment, launcher: LocalLauncher, display: Display, trial: Trial, *_: None
        ) -> None:
            self._launcher = launcher
            self._display = display

        async def run(self, on_ready: Callable[[str, str], None]) -> None:
            (self._launcher.log_dir / "router.log").write_text("{}\n")
            if warning:
                self._display.warning("decode-0", warning)
            if failure:
                raise failure

    monkeypatch.setattr("tandem_cli.up.Supervisor", Mesh)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["up", "--port", "0"]) == (1 if failure else 0)
    logs = list(tmp_path.glob("tandem-*/router.log"))
    assert bool(logs) == is_kept
    said = capsys.readouterr().err
    assert (f"logs are kept in {logs[0].parent}" in said) if logs else ("are kept" not in said)
    repaired("F14", "temporary logs are removed after a clean end, else kept and named")


def test_a_named_log_folder_stays(tmp_path: Path, prepared: Prepared) -> None:
    prepared("--log-dir", str(tmp_path / "logs"))
    assert (tmp_path / "logs").is_dir()


@pytest.mark.parametrize("name", ["port", "metrics_port"])
def test_ports_of_several_routers_end_where_ports_end(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{name} must be <= 65534, got 65535: 2 routers"):
        UpSettings(**{name: 65535}, routers=2)
    assert UpSettings(**{name: 65534}, routers=2).routers == 2


def test_the_default_port_for_http_is_none_of_the_routers(
    prepared: Prepared, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    free = _free_port()
    monkeypatch.setattr("tandem_cli.local_mesh.ports.DEFAULT_HTTP_PORT", free)
    deployment, _ = prepared()
    assert deployment.settings.http_port == free
    deployment, _ = prepared("--port", str(free))
    assert deployment.settings.http_port is None
    assert f"no HTTP, because port {free} is taken" in capsys.readouterr().err
    assert 8080 in UpSettings(port=8079, routers=2).router_ports
    assert 8080 not in UpSettings(port=8079).router_ports
    repaired("D24", "no HTTP, with the option to use")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--http-port", "PORT"), "port and http_port give two services the port"),
        (("--metrics-port", "PORT", "--no-http"), "port and metrics_port give two services the port"),
        (("--http-port", "PORT", "--http-host", "0.0.0.0"), "port and http_port give two services the port"),
    ],
)
def test_two_services_of_a_mesh_do_not_share_a_port(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], said: str, repaired: Repaired
) -> None:
    port = str(_free_port())
    assert f"{said} {port}" in refusal(capsys, "--port", port, *(flag.replace("PORT", port) for flag in flags))
    repaired("D24", "equal ports are refused before anything is loaded")


@pytest.mark.parametrize("flags", [("--host", "0.0.0.0"), ("--http-host", "0.0.0.0", "--http-port", "0")])
def test_other_machines_need_keys(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    said = f"{flags[0]} 0.0.0.0 lets other machines in, so clients need keys"
    assert said in refusal(capsys, "--port", str(_free_port()), *flags)


def test_ports_of_different_addresses_may_be_equal(prepared: Prepared) -> None:
    port = str(_free_port())
    deployment, _ = prepared("--port", port, "--http-port", port, "--http-host", "127.0.0.2")
    assert deployment.settings.http_port == int(port)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@pytest.mark.parametrize(("host", "others"), [("0.0.0.0", ""), ("10.0.0.7", "a,b"), ("[::]", "")])
def test_the_meshs_own_routers_are_reached_without_a_proxy(
    monkeypatch: pytest.MonkeyPatch, host: str, others: str
) -> None:
    monkeypatch.setenv(NO_GRPC_PROXY, "")  # as it was, after the test
    monkeypatch.setenv(NO_PROXY, others)
    reach_directly("127.0.0.1")
    assert os.environ[NO_GRPC_PROXY] == ""
    reach_directly(host)
    assert os.environ[NO_GRPC_PROXY] == ",".join(filter(None, (others, host.strip("[]"))))


def test_the_trial_request_goes_through_no_proxy(
    monkeypatch: pytest.MonkeyPatch, prepared: Prepared, repaired: Repaired
) -> None:
    for name in (NO_GRPC_PROXY, NO_PROXY):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    _, launcher = prepared("--host", "0.0.0.0", "--http-port", "0", "--allow-anonymous")
    assert launcher.environ[NO_GRPC_PROXY] == "0.0.0.0"

    async def run() -> None:
        async with running_router() as router:
            await Trial()(router.address.replace("127.0.0.1", "0.0.0.0"))

    asyncio.run(run())
    repaired("D25", "the routers are reached directly, also by the gateway")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "no sign of life for 0.3 s, and not ready: decode-0"),
        (("--model-loading-timeout=100",), "not ready after 100 s: decode-0"),
    ],
)
def test_a_start_ends_when_its_services_are_silent_or_its_time_is_up(
    flags: tuple[str, ...], said: str, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_LISTEN_S", 0.001)
    monkeypatch.setattr(supervisor_module, "_SILENT_S", 0.3)
    deployment, launcher = prepared(*flags)

    async def run() -> None:
        supervisor = Supervisor(deployment, launcher, Display(Console()), Trial())
        if flags:
            supervisor._start_ends_s = time.monotonic()
        await supervisor._next_while_starting({"decode-0"})

    with pytest.raises(MeshFailed, match=said):
        asyncio.run(run())


def test_a_start_that_was_stopped_hears_what_services_said_meanwhile(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "_LISTEN_S", 0.05)
    monkeypatch.setattr(supervisor_module, "_SILENT_S", 0.5)
    deployment, launcher = prepared()

    async def run() -> None:
        supervisor = Supervisor(deployment, launcher, Display(Console()), Trial())
        loop = asyncio.get_running_loop()

        def stand_still() -> None:
            time.sleep(1.0)  # as if the machine slept
            loop.call_later(0.01, supervisor._queue.put_nowait, _TrialEnded())

        loop.call_soon(stand_still)
        assert isinstance(await supervisor._next_while_starting({"decode-0"}), _TrialEnded)

    asyncio.run(run())


def test_a_trial_that_breaks_ends_the_start_at_once(prepared: Prepared) -> None:
    class Broken(Trial):
        async def __call__(self, address: str) -> None:
            raise LookupError("unforeseen")

    deployment, launcher = prepared()

    async def run() -> None:
        supervisor = Supervisor(deployment, launcher, Display(Console()), Broken())
        await asyncio.wait_for(supervisor._run_trial("127.0.0.1:1"), 60)

    with pytest.raises(LookupError):
        asyncio.run(run())
