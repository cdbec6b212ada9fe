"""OUT: serving.properties that `tandem up` reads by itself, the report, and the plot."""

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoint.source import ModelSource
from mesh.domain.errors import ConfigurationError
from tandem_cli.configuration.low_code import WRITTEN_BY, find_written
from tandem_cli.local_mesh.deployment import Deployment
from tandem_cli.main import main
from tandem_cli.model_files.model_folders import BUNDLED, BUNDLED_MODELS
from tandem_cli.optimization.candidates import BASE, USUAL, Candidate, Layout
from tandem_cli.optimization.choice import CandidateResult, PrecisionQuality, choose
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.optimization.result import (
    SearchOutcome,
    plot_svg,
    properties_of,
    publish,
    report_json,
    report_markdown,
    rows_of,
    summary,
)

QUALITY = {
    BASE: PrecisionQuality(1.0, 0.0, 2.0, 2.0),
    "int8": PrecisionQuality(0.99, 0.001, 2.01, 2.0),
    "int4": PrecisionQuality(0.9, 0.1, 2.4, 2.0),
}


def figures(speed: float, ttft: float = 100.0) -> dict[str, float]:
    return {
        "output_tokens_per_s": speed,
        "ttft_p50_ms": ttft / 2,
        "ttft_p99_ms": ttft,
        "gap_p99_ms": 9.0,
        "memory_bytes": 1e8,
        "load_s": 2.0,
        "num_ok": 64.0,
    }


def outcome(recipe: Recipe, *, none_eligible: bool = False) -> SearchOutcome:
    results = [
        CandidateResult(Candidate(BASE, "none", USUAL), {0: figures(100)}),
        CandidateResult(Candidate("int8", "ngram", Layout(0, 2)), {0: figures(180, ttft=80.0)}),
        CandidateResult(Candidate("int4", "none", USUAL), {0: figures(150)}),
        CandidateResult(Candidate("awq", "none", USUAL), failure="the mesh did not start: <why>"),
    ]
    choice = None if none_eligible else choose(results[:2])
    rows = rows_of(results, QUALITY, choice, recipe)
    return SearchOutcome("tandem-small", {"prompts": 64}, recipe, rows, results[0], choice, {"fp8, x": "no fp8"})


def test_the_report_for_programs() -> None:
    report = report_json(outcome(Recipe(price_per_hour=3.6)))
    assert (report["chosen"], report["speedup"]) == ("int8, ngram, 2 colocated", 1.8)
    chosen, int4, base, awq = report["candidates"]
    assert (chosen["chosen"], chosen["why_not"], chosen["pareto"]) == (True, None, True)
    assert chosen["price_per_million"] == pytest.approx(3.6 / (3600 * 180) * 1e6)
    assert chosen["settings"] == {"quantize": "int8", "speculative": "ngram", "colocated": "true", "decode": "2"}
    assert int4["why_not"] == "loses 20.0% of the quality, over 1.0%"
    assert base["speedup"] == 1.0
    assert awq["figures"] == {}
    assert report["not_tried"] == {"fp8, x": "no fp8"}
    json.dumps(report)


def test_the_report_for_people() -> None:
    text = report_markdown(outcome(Recipe(price_per_hour=3.6)))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1, "all rows have all cells"
    assert "| 1* | int8, ngram, 2 colocated | 180 | 1.80 | 64 | 40 / 80 ms |" in text
    assert "Chosen: int8, ngram, 2 colocated: 180 output tokens/s, 1.80 x those of base" in text
    assert "* fp8, x: no fp8" in text


def test_no_candidate_keeps_the_limits() -> None:
    lines = summary(outcome(Recipe(slo_ttft=64.0), none_eligible=True))
    assert lines[0].startswith("No candidate keeps all limits")
    assert lines[1] == "* int8, ngram, 2 colocated: TTFT p99 is 1.25 x its limit"
    assert "base, 1 prefill + 1 decode: TTFT p99 is 1.56 x its limit" in lines[3]


def test_the_plot_is_one_file_of_xml() -> None:
    root = ElementTree.fromstring(plot_svg(outcome(Recipe(slo_ttft=90.0))))
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "1  int8, ngram, 2 colocated" in texts
    assert "limit 90" in texts
    titles = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == 6, "three candidates in two panels"
    assert not any("href" in key for element in root.iter() for key in element.attrib)


Prepared = Callable[..., Deployment]


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> Prepared:
    """The deployment of `tandem up` with these words."""
    found: list[Deployment] = []

    class Recorder:
        def __init__(self, deployment: Deployment, *_: object) -> None:
            found.append(deployment)

        async def run(self, on_ready: object) -> None:
            """Start nothing."""

    monkeypatch.setattr("tandem_cli.up.Supervisor", Recorder)

    def run(*words: str) -> Deployment:
        assert main(["up", "--port", "0", *words]) == 0
        return found[-1]

    return run


def write(out: Path, text: str) -> str:
    out.mkdir(exist_ok=True)
    (out / "serving.properties").write_text(text)
    return str(out)


@pytest.mark.parametrize("as_flag", [False, True])
def test_up_serves_the_folder_with_a_reference(tmp_path: Path, prepared: Prepared, as_flag: bool) -> None:
    candidate = Candidate("int8", "ngram", Layout(0, 2))
    out = write(tmp_path / "out", properties_of(candidate, "tandem-small", ""))
    deployment = prepared("--model", out) if as_flag else prepared(out)
    (model,) = deployment.models
    assert (model.name, model.folder) == ("tandem-small", str(BUNDLED))
    workers = deployment.workers("127.0.0.1:1")
    assert [worker.role for worker in workers] == ["decode", "decode"]
    settings = deployment.resolve(workers[0], {})
    assert (settings.quantize, settings.speculative) == ("int8", "ngram")
    router = deployment.resolve(deployment.router(), {})
    assert router.max_concurrent_requests != 1000, "LMI's defaults were not measured"


def test_up_serves_the_folder_with_a_checkpoint(tmp_path: Path, prepared: Prepared) -> None:
    out = write(tmp_path / "out", properties_of(Candidate("awq", "draft", USUAL), "", "tandem-draft"))
    published: list[str] = []
    publish(BUNDLED, tmp_path / "out", published)
    assert "config.json" in published
    deployment = prepared(out, "--decode", "2")
    (model,) = deployment.models
    assert (model.name, model.folder) == ("out", out)
    assert [len(model.cores.prefill), len(model.cores.decode)] == [1, 2], "flags win"
    worker = deployment.workers("127.0.0.1:1")[-1]
    assert deployment.resolve(worker, {}).draft_model == str(BUNDLED_MODELS / "tandem-draft")


def test_a_checkpoint_that_is_put_half_into_the_folder_is_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [path.name for path in BUNDLED.iterdir() if path.is_file()]
    for count in range(len(names)):
        out, done = tmp_path / str(count), list[object]()
        out.mkdir()

        def link(path: Path, target: Path, count: int = count, done: list[object] = done) -> None:
            if len(done) == count:
                raise KeyboardInterrupt
            done.append(shutil.copyfile(path, target))

        monkeypatch.setattr("os.link", link)
        with pytest.raises(KeyboardInterrupt):
            publish(BUNDLED, out, published := [])
        assert {path.name for path in out.iterdir()} == set(published[:-1]), "the last one had only begun"
        assert len(published) == count + 1
        with pytest.raises(ConfigurationError, match=r"holds no model: it has no config\.json"):
            ModelSource(str(out)).locate()


def test_files_of_others_are_not_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert find_written([write(tmp_path / "a", "option.entryPoint=model.py\n")]) is None
    assert find_written([str(tmp_path)]) is None
    assert find_written([f"name={tmp_path / 'a'}"]) is None
    for line in ("option.entryPoint=model.py", "option.entryPoint: model.py", "option\\u002eentryPoint=model.py"):
        out = write(tmp_path / "b", f"{WRITTEN_BY}\noption.quantize=int8\n{line}\n")
        with pytest.raises(ConfigurationError, match="which tandem optimize does not write"):
            find_written([out])


def test_values_survive_the_format_of_the_file(tmp_path: Path, prepared: Prepared) -> None:
    odd = tmp_path / "a b:ü#\\"
    odd.symlink_to(BUNDLED)
    out = write(tmp_path / "out", properties_of(Candidate(BASE, "none", USUAL), str(odd), ""))
    assert prepared(out).models[0].folder == str(BUNDLED)
