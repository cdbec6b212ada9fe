"""Requests of a batch: which can be sent, and how, before a gateway that answers as it is told."""

import json
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import pytest

from gateway.batches import send
from gateway.batches.files import AnswerFile, BatchRequest, read_requests
from gateway.batches.send import NoGateway, Sender, Tally


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send, "_FIRST_PAUSE_S", 0.0)


async def sent(folder: Path, answers: Sequence[httpx2.Response], patience_s: float = 60.0) -> tuple[Tally, int]:
    """Send one request, which gets one answer after the other, and the last one again. Returns how often it asked."""
    left = list(answers)
    asked = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.content)
        return left.pop(0) if len(left) > 1 else left[0]

    request = BatchRequest("a", "/v1/chat/completions", b'{"x": 1}')
    async with httpx2.AsyncClient(transport=httpx2.MockTransport(answer), base_url="http://gateway") as http:
        sender = Sender(http, patience_s=patience_s, on_wait=lambda _: None)
        with AnswerFile(folder / "out.jsonl") as file:
            await sender.send_all(iter([request]), file, 1, lambda: None)
            assert len(file.done) == sender.tally.num_answered + sender.tally.num_refused
    assert set(asked) == {request.content}
    return sender.tally, len(asked)


async def test_a_request_that_is_out_of_time_again_and_again_is_an_error(tmp_path: Path) -> None:
    slow, full = httpx2.Response(504, json={"error": "slow"}), httpx2.Response(429)
    tally, num_asked = await sent(tmp_path, [full, slow, full, slow, full, slow])
    assert (tally.num_refused, num_asked) == (1, 6)


async def test_a_request_that_was_out_of_time_may_be_answered(tmp_path: Path) -> None:
    slow = httpx2.Response(504)
    tally, num_asked = await sent(tmp_path, [slow, slow, httpx2.Response(200, json={})])
    assert (tally.num_answered, num_asked) == (1, 3)


@pytest.mark.parametrize("pause", ["9" * 5000, "9" * 400, "٣", "-1", "soon"])
async def test_a_pause_that_is_no_time_is_none(tmp_path: Path, pause: str) -> None:
    full = httpx2.Response(429, headers={b"retry-after-ms": pause.encode()})
    tally, num_asked = await sent(tmp_path, [full, httpx2.Response(200, json={})])
    assert (tally.num_answered, num_asked) == (1, 2)


@pytest.mark.parametrize(
    "answer",
    [
        httpx2.Response(405),
        httpx2.Response(307, headers={"location": "https://gateway/"}),
        httpx2.Response(404, text="<h1>Not Found</h1>"),
        httpx2.Response(404, json={"detail": "Not Found"}),
        httpx2.Response(404, json={"error": {"code": None, "type": "invalid_request_error"}}),
    ],
)
async def test_what_is_said_of_a_route_is_no_answer(tmp_path: Path, answer: httpx2.Response) -> None:
    with pytest.raises(NoGateway, match="is not served"):
        await sent(tmp_path, [answer])
    assert (tmp_path / "out.jsonl").read_bytes() == b""


async def test_an_answer_that_is_no_json_is_kept_as_text(tmp_path: Path) -> None:
    tally, _ = await sent(tmp_path, [httpx2.Response(200, content=b"[" * 100_000)])
    assert tally.num_answered == 1


def test_an_answer_with_half_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    """Another gateway may send one, as JSON allows."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path) as answers:
        answers.write("a", 200, "", {"text": "cut: \ud83d, whole: \U0001f600"})
    with AnswerFile(path) as answers:
        assert answers.done == {"a"}
    (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert json.loads(line)["response"]["body"] == {"text": "cut: \ud83d, whole: \U0001f600"}


def test_answers_are_lines_for_clients_that_know_more_ends_of_lines(tmp_path: Path) -> None:
    path, text = tmp_path / "out.jsonl", "".join(map(chr, (0xA, 0xB, 0xC, 0xD, 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029)))
    with AnswerFile(path) as answers:
        answers.write("a", 200, "", {"text": text})
    (line,) = path.read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["response"]["body"] == {"text": text}


@pytest.fixture
def small_files() -> Iterator[int]:
    """No file may have more bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, before[1]))
    yield 8 << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_answer_that_does_not_fit_leaves_no_part_of_its_line(tmp_path: Path, small_files: int) -> None:
    """The file is shown to clients as it is."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path) as answers:
        answers.write("a", 200, "", "x" * (small_files // 2))
        with pytest.raises(OSError, match="too large"):
            answers.write("b", 200, "", "x" * (small_files // 2))
        assert answers.done == {"a"}
    (line,) = path.read_text().splitlines(keepends=True)
    assert line.endswith("\n")


@pytest.mark.parametrize(
    ("own", "keeps", "sent_as"), [("standard", True, "standard"), (None, True, "batch"), ("standard", False, "batch")]
)
def test_the_priority_is_the_lowest_unless_the_line_has_one(
    tmp_path: Path, own: str | None, keeps: bool, sent_as: str
) -> None:
    """Null is none."""
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x", "priority": own}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    [request] = read_requests(tmp_path / "in.jsonl", keeps_priority=keeps)
    assert json.loads(request.content)["priority"] == sent_as
