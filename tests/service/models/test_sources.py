"""Models from folders, S3 and the hub: against servers of this machine, with the libraries' real clients."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoint.source import ModelSource, _by_percent
from mesh.domain.errors import ConfigurationError
from tests.fakes.file_servers import COMMIT, HubServer, S3Server
from tests.waiting import LIMIT_S

WEIGHTS = bytes(range(256)) * (9 << 13)  # 18 MiB: two ranges
TOOL_USE = "additional_chat_templates/tool_use.jinja"
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": WEIGHTS,
    "generation_config.json": b"{}",
    "chat_template.jinja": b"chat",
    TOOL_USE: b"tools",
}
NOT_WANTED = {
    "modeling.py": b"boom",
    "consolidated.safetensors": b"twice",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"",
    "onnx/config.json": b"",
    "additional_chat_templates/config.json": b"{}",
    "additional_chat_templates/README.md": b"",
    "additional_chat_templates/old/tool_use.jinja": b"",
    "README.md": b"",
}


def files_under(prefix: str) -> dict[str, bytes]:
    return {f"{prefix}/{name}": body for name, body in (MODEL | NOT_WANTED).items()}


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server.serving(files_under("bucket/models/small")) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
        yield server


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer.serving(files_under("org/small")) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
        template = f"{server.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield server


def test_progress_is_told_by_percent_and_now_and_then() -> None:
    told: list[float] = []
    now_s = 0.0
    report = _by_percent(told.append, lambda: now_s)
    for seconds, fraction in ((1, 0.001), (2, 0.002), (3, 0.011), (32, 0.012), (33, 0.013), (34, 0.014), (64, 0.015)):
        now_s = float(seconds)
        report(fraction)
    assert told == [0.001, 0.011, 0.013, 0.015]


def test_the_folder_of_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="it holds a LoRA adapter: serve its base model with --adapter"):
        ModelSource(str(tmp_path)).locate()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = ModelSource(str(tmp_path))
    assert (source.locate(), source.short_name, source.is_remote) == (tmp_path, tmp_path.name, False)


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("/nowhere", "", "there is no model folder /nowhere"),
        ("small", "", "there is no model folder small"),
        ("./org/name", "", "there is no model folder"),
        ("{tmp}", "", "holds no model: it has no config.json"),
        (__file__, "", r"test_sources\.py is a file: name the folder that it is in"),
        ("{tmp}", "v1", "revision is for models on the Hugging Face hub"),
        ("s3://", "", "names no bucket"),
        ("~nobody-here/small", "", "there is no home folder for ~nobody-here"),
    ],
)
def test_names_that_mean_nothing(tmp_path: Path, name: str, revision: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ModelSource(name.format(tmp=tmp_path), revision, str(tmp_path / "cache")).locate()


def test_a_folder_of_the_hubs_cache_is_told_what_to_give(tmp_path: Path) -> None:
    folder = tmp_path / "models--acme--small"
    (folder / "snapshots").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="give the name acme/small, or a folder in its snapshots"):
        ModelSource(str(folder)).locate()


def test_s3_is_copied_once_in_ranges(s3: S3Server, tmp_path: Path) -> None:
    told: list[float] = []
    source = ModelSource("s3://bucket/models/small/", cache_dir=str(tmp_path))
    folder = source.locate(told.append)
    assert contents(folder) == MODEL
    assert source.short_name == "small"
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert s3.ranges["bucket/models/small/model.safetensors"] == 2
    assert source.locate() == folder
    assert set(s3.reads.values()) == {1}
    s3.files["bucket/models/small/config.json"] = b'{"new": 1}'
    changed = source.locate()
    assert changed != folder
    assert contents(changed)["config.json"] == b'{"new": 1}'


def test_s3_lists_the_folder_of_templates_where_there_is_one(s3: S3Server, tmp_path: Path) -> None:
    source = ModelSource("s3://bucket/models/small", cache_dir=str(tmp_path))
    folder = source.locate()
    assert set(s3.listings) == {"models/small/", "models/small/additional_chat_templates/"}
    s3.files[f"bucket/models/small/{TOOL_USE}"] = b"other"
    assert contents(source.locate())[TOOL_USE] == b"other"
    assert contents(folder)[TOOL_USE] == b"tools"
    s3.files = {name: body for name, body in s3.files.items() if "additional_chat_templates" not in name}
    s3.listings.clear()
    assert TOOL_USE not in contents(source.locate())
    assert set(s3.listings) == {"models/small/"}


def test_what_a_listing_has_outside_the_model_is_not_written(s3: S3Server, tmp_path: Path) -> None:
    templates = "additional_chat_templates"
    s3.strays = ["config.json", "models/other/other.json", f"{templates}/other.jinja", f"models/small/{templates}/"]
    s3.strays += [f"models/small/{templates}/../../other.jinja", f"models/small/../{templates}/other.jinja"]
    assert contents(ModelSource("s3://bucket/models/small", cache_dir=str(tmp_path)).locate()) == MODEL


# The library leaves a connection that broke to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning")
def test_a_copy_that_was_cut_off_goes_on(s3: S3Server, tmp_path: Path) -> None:
    weights = "bucket/models/small/model.safetensors"
    source = ModelSource("s3://bucket/models/small", cache_dir=str(tmp_path))
    s3.cut_off.add(weights)
    with pytest.raises(ConfigurationError, match="cannot get s3://bucket/models/small"):
        source.locate()
    partial = next(path for path in (tmp_path / "s3").iterdir() if path.suffix == ".partial")
    assert "model.safetensors" not in contents(partial)
    for name in ("model.safetensors", TOOL_USE):
        (partial / f"{name}.1a2B3c").write_bytes(b"left by a process that was killed")
    s3.cut_off.clear()
    assert contents(source.locate()) == MODEL
    assert s3.reads["bucket/models/small/config.json"] == 1


def _locate(name: str, cache_dir: str, barrier: Callable[[], int], results: "multiprocessing.Queue[str]") -> None:
    barrier()
    results.put(str(ModelSource(name, cache_dir=cache_dir).locate()))


def test_processes_that_start_at_once_copy_once(s3: S3Server, tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(2), spawn.Queue()
    arguments = ("s3://bucket/models/small", str(tmp_path), barrier.wait, results)
    processes = [spawn.Process(target=_locate, args=arguments) for _ in range(2)]
    try:
        for process in processes:
            process.start()
        folders = {results.get(timeout=LIMIT_S) for _ in processes}
        for process in processes:
            process.join(LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert len(folders) == 1
    assert contents(Path(folders.pop())) == MODEL
    assert set(s3.reads.values()) == {1}


def test_a_whole_copy_serves_where_nothing_can_be_written(s3: S3Server, tmp_path: Path) -> None:
    """As in a cache that is mounted to be read only: no lock can be taken there."""
    source = ModelSource("s3://bucket/models/small", cache_dir=str(tmp_path))
    folder = source.locate()
    lock = Path(f"{folder}.lock")
    lock.unlink(missing_ok=True)
    lock.mkdir()  # so that nobody can open it, not even root
    assert source.locate() == folder
    assert set(s3.reads.values()) == {1}


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("s3://bucket/models", "s3://bucket/models holds no model"),
        ("s3://other/models/small", r"cannot get s3://other/models/small: .*NoSuchBucket"),
    ],
)
def test_s3_without_a_model(s3: S3Server, tmp_path: Path, uri: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ModelSource(uri, cache_dir=str(tmp_path)).locate()


def test_the_hub_is_asked_once_and_its_cache_serves_offline(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[float] = []
    source = ModelSource("org/small")
    folder = source.locate(told.append)
    assert contents(folder) == MODEL
    assert (folder.name, source.short_name) == (COMMIT, "small")
    assert told[-1] == 1.0
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert source.locate() == folder
    assert ModelSource("org/small", COMMIT).locate() == folder
    assert set(hub.reads.values()) == {1}
    with pytest.raises(ConfigurationError, match=r"cannot get model org/other from the hub: .*HF_HUB_OFFLINE"):
        ModelSource("org/other").locate()


def test_a_hub_that_is_away_is_not_missed_when_all_is_cached(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ModelSource("org/small").locate()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert ModelSource("org/small").locate() == folder
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigurationError, match=r"org/small.*tokenizer\.json"):
        ModelSource("org/small").locate()


@pytest.mark.parametrize(
    ("name", "revision", "said"),
    [
        ("org/other", "", "org/other is neither a folder here nor a model of the hub"),
        ("org/small", "v9", "the hub has no model org/small at revision v9"),
    ],
)
def test_what_the_hub_does_not_have(hub: HubServer, name: str, revision: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ModelSource(name, revision).locate()
