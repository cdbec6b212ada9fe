"""The commands that talk to a running mesh, against a fake router."""

import io
import json
from collections import deque
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

import tandem
from tandem.v1 import generation_pb2, mesh_pb2
from tandem_cli.main import main
from tests.defects import Repaired
from tests.fakes.sdk_router import STORY, FakeRouter, Refusal, interrupt_main_thread

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(threaded_router: FakeRouter, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command against the fake router; returns status, stdout, stderr."""
    monkeypatch.setenv("TANDEM_ADDRESS", threaded_router.address)
    monkeypatch.setenv("COLUMNS", "200")

    def command(*argv: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        status = main(argv)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return command


def test_generate_streams_and_ends_with_the_facts(run: Run, threaded_router: FakeRouter) -> None:
    status, out, err = run("generate", "hi", "--max-new-tokens", "8", "--temperature", "0.5", "--seed", "7")
    assert (status, out) == (0, STORY[:8] + "\n")
    assert err.startswith("length · 8 tokens · confidence 0.606 · first token ")
    (request,) = threaded_router.script.requests
    assert [turn.content for turn in request.chat.messages] == ["hi"]
    assert (request.sampling.temperature, request.sampling.seed) == (0.5, 7)


def test_generate_raw_from_standard_input(run: Run, threaded_router: FakeRouter) -> None:
    assert run("generate", "-", "--raw", "--stop", "x", typed="Once")[0] == 0
    (request,) = threaded_router.script.requests
    assert (request.prompt, list(request.sampling.stop)) == ("Once", ["x"])


def test_generate_for_machines(run: Run) -> None:
    status, out, err = run("generate", "hi", "--json", "--top-logprobs", "1", "--max-new-tokens", "2")
    answer = json.loads(out)
    assert (status, err) == (0, "")
    assert (answer["text"], answer["finish_reason"], answer["request_id"]) == ("On", "length", "request-1")
    assert answer["tokens"][0]["top"] == [{"id": 0, "text": "A", "logprob": -0.5}]


def test_breakdown_shows_each_phase_and_one_request(run: Run, threaded_router: FakeRouter) -> None:
    asked = ("--requests", "5", "--concurrency", "2", "--input-tokens", "9", "--output-tokens", "4")
    status, out, _ = run("breakdown", *asked)
    assert status == 0
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    assert rows["prefill"][1:4] == ["8.0"] * 3
    assert rows["backoff"][1:4] == ["4.0"] * 3
    assert rows["total"][4:] == ["100.0", "%"]
    assert "2 attempts" in out
    assert all(letter in out.splitlines()[-1] for letter in "qdPbtwD")
    requests = threaded_router.script.requests
    assert [len(request.token_ids.ids) for request in requests] == [9] * 5
    assert len({tuple(request.token_ids.ids) for request in requests}) == 5


def test_breakdown_for_machines(run: Run) -> None:
    status, out, _ = run("breakdown", "--requests", "2", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["phases"]["wait"]["p99_ms"] == 7.0
    assert sum(row["share"] for name, row in found["phases"].items() if name != "total") == pytest.approx(1)
    assert [request["attempts"] for request in found["requests"]] == [2, 2]
    for request in found["requests"]:
        assert sum(length for _, length in request["steps"]) == pytest.approx(max(35.0, request["total_ms"]))


def test_workers_and_models(run: Run) -> None:
    status, out, _ = run("workers")
    assert status == 0
    assert all(text in out for text in ("prefill-0", "decode-0", "60/64", "ready"))
    status, out, _ = run("models")
    assert status == 0
    assert "fake" in out
    assert "adapters" not in out


def test_models_shows_the_adapters_that_requests_may_name(run: Run, threaded_router: FakeRouter) -> None:
    other_model = generation_pb2.Model(name="other", adapters=["french", "legal"])
    threaded_router.script.more_models = (other_model,)
    status, out, _ = run("models")
    assert status == 0
    head, fake, other = out.splitlines()
    assert head.split()[-1] == "adapters"
    assert fake.split()[-1] == "yes"
    assert other.endswith("french, legal")


def test_models_for_programs(run: Run, threaded_router: FakeRouter) -> None:
    threaded_router.script.more_models = (generation_pb2.Model(name="other", adapters=["french"]),)
    status, out, err = run("models", "--json")
    assert (status, err) == (0, "")
    models = json.loads(out)["models"]
    assert [(model["name"], model["adapters"]) for model in models] == [("fake", []), ("other", ["french"])]
    assert {"ready", "max_input_tokens", "max_total_tokens", "vocab_size", "sampling_defaults"} <= models[0].keys()


def test_workers_for_machines(run: Run, threaded_router: FakeRouter) -> None:
    threaded_router.mesh.traffic = {"chat": {"v1": 3, "v2": 1}}
    threaded_router.mesh.routed = {"chat": {"v1": 2}}
    status, out, err = run("workers", "--json")
    mesh = json.loads(out)
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert [worker["worker_id"] for worker in mesh["workers"]] == ["prefill-0", "decode-0"]
    assert mesh["traffic"] == {"chat": {"v1": 3, "v2": 1}}
    assert mesh["routed"] == {"chat": {"requests": {"v1": 2}, "span_s": 40}}


def test_chat_remembers(run: Run, threaded_router: FakeRouter) -> None:
    status, out, err = run(
        "chat", "--system", "be brief", "--max-new-tokens", "3", typed="hi\nmore\n/reset\nagain\n/quit\n"
    )
    assert (status, out) == (0, "One\n" * 3)
    assert err.count("length · 3 tokens") == 3
    asked = [[turn.content for turn in request.chat.messages] for request in threaded_router.script.requests]
    assert asked == [["be brief", "hi"], ["be brief", "hi", "One", "more"], ["be brief", "again"]]


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(run: Run, threaded_router: FakeRouter) -> None:
    def interrupt() -> None:
        script.hold_after_messages = None
        interrupt_main_thread()

    script = threaded_router.script
    script.hold_after_messages = 3
    script.on_holding = interrupt
    status, _, err = run("chat", typed="hi\nmore\n")
    assert status == 0
    assert "(stopped)" in err
    *before, more = (turn.content for turn in script.requests[1].chat.messages)
    assert more == "more"
    if before:  # else Ctrl-C was faster than the first token: then the question is taken back, too
        hi, shown = before
        assert hi == "hi"
        assert "One".startswith(shown)


def test_chat_survives_a_failed_answer(run: Run, threaded_router: FakeRouter) -> None:
    threaded_router.script.refusals = deque([Refusal(grpc.StatusCode.INVALID_ARGUMENT, "too long")])
    status, out, err = run("chat", typed="hi\nhi\n")
    assert status == 0
    assert out.endswith(STORY + "\n")
    assert "too long" in err
    assert len(threaded_router.script.requests[1].chat.messages) == 1


def test_an_error_is_one_line(run: Run, threaded_router: FakeRouter) -> None:
    threaded_router.script.refusals = deque([Refusal(grpc.StatusCode.UNAUTHENTICATED, "no key")])
    assert run("generate", "hi", "--raw") == (1, "", "tandem: no key; set TANDEM_API_KEY\n")
    status, out, err = run("models", "--address", "127.0.0.1:1")
    assert (status, out, err.count("\n")) == (1, "", 1)
    assert "cannot reach 127.0.0.1:1: nothing listens there; start a mesh with: tandem up" in err


def test_the_api_key_comes_from_the_environment(
    run: Run, threaded_router: FakeRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_API_KEY", "secret")
    assert run("generate", "hi", "--raw")[0] == 0
    assert threaded_router.script.metadata[0]["authorization"] == "Bearer secret"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("tandem ")


def test_workers_are_drained_and_taken_back(run: Run, threaded_router: FakeRouter) -> None:
    status, out, _ = run("drain", "decode-0", "prefill-0")
    assert (status, out.splitlines()[1]) == (
        0,
        "prefill-0 ends what it has, and gets nothing new until: tandem undrain prefill-0",
    )
    assert run("undrain", "decode-0")[:2] == (0, "decode-0 is in service again\n")
    assert threaded_router.mesh.drained == [("decode-0", True), ("prefill-0", True), ("decode-0", False)]


def test_a_drain_says_which_role_nobody_serves_in(run: Run, threaded_router: FakeRouter) -> None:
    threaded_router.mesh.serving = ("decode-1", "decode-2")
    assert run("drain", "decode-0", "decode-1")[2] == ""
    status, out, err = run("drain", "decode-0", "decode-1", "decode-2")
    assert (status, len(out.splitlines())) == (0, 3)
    assert err == (
        "tandem: no other decode worker is in service: new requests wait for the router's no_worker_timeout_s, and "
        "fail unless one is back by then\n"
    )
    assert run("drain", "prefill-0")[2] == (
        "tandem: no other prefill worker is in service: decode workers compute prompts beside their answers\n"
    )


def test_traffic_is_set_and_shown(run: Run, threaded_router: FakeRouter) -> None:
    status, out, err = run("traffic")
    assert (status, out) == (0, "")
    assert err == "no name stands for revisions; give one with: tandem traffic NAME MODEL=SHARE ...\n"
    assert run("traffic", "chat", "v1=3", "v2=1")[:2] == (0, "chat: v1 75 %, v2 25 %\n")
    assert threaded_router.mesh.traffic == {"chat": {"v1": 3, "v2": 1}}
    assert run("traffic", "other", "v3=1")[:2] == (0, "other: v3 100 %\n")
    assert run("traffic")[:2] == (0, "chat: v1 75 %, v2 25 %\nother: v3 100 %\n")
    status, _, err = run("traffic", "chat", "v1=90", "v1=10")
    assert (status, threaded_router.mesh.traffic["chat"]) == (2, {"v1": 3, "v2": 1})
    assert "chat gets one share of each model, got one twice: v1=90 v1=10" in err
    status, _, err = run("traffic", "chat", "v1")
    assert (status, err) == (2, "tandem: shares are given as MODEL=SHARE, such as v2=10, got 'v1'\n")
    status, _, err = run("traffic", "unknown")
    assert (status, err) == (1, "tandem: 'unknown' stands for no revisions; see: tandem models\n")


def test_traffic_without_its_name_is_refused(run: Run, threaded_router: FakeRouter, repaired: Repaired) -> None:
    for words in (("v1=50", "v2=50"), ("v1=50",), ("chat:v1", "v1=50"), ("v1,v2", "v1=1")):
        status, _, err = run("traffic", *words)
        said = f"tandem: the name comes first, as in tandem traffic chat v1=90 v2=10, got {words[0]!r}\n"
        assert (status, err) == (2, said)
    assert threaded_router.mesh.traffic == {}
    assert run("traffic", "chat", "v1=0", "v2=0")[:2] == (0, "chat stands for no revisions any more\n")
    repaired("D21", "refused, with the name that was read")


def test_what_the_sdk_refuses_is_a_wrong_command(run: Run, tmp_path: Path, repaired: Repaired) -> None:
    for words, said in (
        (("--tls-ca", str(tmp_path / "none")), "cannot read the CA file"),
        (("--address", "http://127.0.0.1:1"), "is a URL"),
    ):
        status, _, err = run("models", *words)
        assert (status, said in err) == (2, True)
    repaired("D30", "status 2, as for all wrong words")


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_watching_goes_on_while_no_router_answers(
    run: Run, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], repaired: Repaired
) -> None:
    answers = iter([None, tandem.ConnectionFailed("nothing listens there"), tandem.DeadlineExceeded("too slow"), None])
    ask = tandem.Client.mesh

    def mesh(client: tandem.Client, *, timeout: float | None = None) -> tandem.Mesh:
        error = next(answers, KeyboardInterrupt())
        if error is not None:
            raise error
        return ask(client, timeout=timeout)

    monkeypatch.setattr(tandem.Client, "mesh", mesh)
    status, out, err = run("workers", "--watch", "--interval", "0", *flags)
    assert (status, next(answers, "all asked"), "prefill-0" in out) == (0, "all asked", True)
    if flags:
        assert err == "tandem: nothing listens there\ntandem: too slow\n"
        assert [len(json.loads(line)["workers"]) for line in out.splitlines()] == [2, 2]
    else:  # no terminal: one table below the other, as they come
        assert (out.count("worker "), out.count("no newer state: nothing listens there")) == (4, 1)
    repaired("D29", "shows the error and goes on")


def test_watching_needs_a_router_at_first(run: Run) -> None:
    assert run("workers", "--watch", "--address", "127.0.0.1:1")[0] == 1


def test_a_worker_is_switched_and_waited_for(run: Run, threaded_router: FakeRouter) -> None:
    assert run("switch", "decode-0", "prefill")[0] == 0
    assert threaded_router.mesh.switched == [("decode-0", mesh_pb2.WORKER_ROLE_PREFILL)]
    status, _, err = run("switch", "decode-7", "prefill", "--wait", "0.1")
    assert (status, err) == (
        1,
        "tandem: decode-7 does not serve as prefill after 0.1 s; see: tandem workers\n",
    )
    assert run("switch", "decode-7", "prefill", "--wait", "0")[0] == 0
