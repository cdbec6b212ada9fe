"""What commands show: speeds, answers as they come, confidence as colour."""

import io
import math
from dataclasses import replace

import pytest
from rich.color import Color
from rich.console import Console
from rich.table import Table
from rich.text import Text

import tandem
from tandem_cli.chat import Conversation, command
from tandem_cli.optimization.progress import ShownProgress
from tandem_cli.terminal import (
    SCALE,
    FittingTable,
    Painter,
    StreamedAnswer,
    colour_of,
    error_console,
    progress_bar,
    show_confidence,
    strip_controls,
    wide_console,
)
from tandem_cli.workers import TimedMesh, render, tokens_per_s


def test_text_with_brackets_and_colons_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "best[awq] [/INST] :warning:"
    table = Table("name")
    table.add_row(text)
    for console in (wide_console(), error_console()):
        console.print(text)
        console.print(FittingTable(table))
    out, err = capsys.readouterr()
    assert (out.count(text), err.count(text)) == (2, 2)


def test_what_a_search_does_is_no_markup() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    with progress_bar(console) as bar:
        ShownProgress(bar).doing("best[/awq]", 0.5)


def worker(role: str, num_tokens: int) -> tandem.Worker:
    load = tandem.WorkerLoad(free_blocks=3, generated_tokens=num_tokens, computed_tokens=2 * num_tokens)
    return tandem.Worker(
        worker_id=f"{role}-0",
        incarnation=role,
        role=role,
        state="ready",
        address="127.0.0.1:7",
        model="m",
        device="cpu",
        pid=7,
        num_blocks=8,
        load=load,
        last_seen_s=0.1,
    )


def sample(at_s: float, num_tokens: int) -> TimedMesh:
    return TimedMesh(at_s, tandem.Mesh((worker("prefill", num_tokens), worker("decode", num_tokens)), 1, 2))


def test_speed_is_what_was_done_since_the_last_look() -> None:
    assert tokens_per_s(sample(1.0, 10), sample(3.0, 30)) == {"prefill": 20.0, "decode": 10.0}


def test_a_restarted_worker_has_no_speed_yet() -> None:
    now = sample(3.0, 0)
    restarted = replace(now.mesh.workers[1], incarnation="new")
    now = TimedMesh(3.0, replace(now.mesh, workers=(now.mesh.workers[0], restarted)))
    assert tokens_per_s(sample(1.0, 0), now) == {"prefill": 0.0}


def test_the_workers_table() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(sample(3.0, 30), sample(1.0, 10)))
    shown = capture.get()
    assert all(
        text in shown for text in ("prefill-0", "decode-0", "3/8", "127.0.0.1:7", "tokens/s", "2 active, 1 queued")
    )


def test_advice_is_shown_below_the_workers() -> None:
    full, idle = tandem.Advice("add", "decode", "KV is full"), tandem.Advice("remove", "prefill", "they are idle")
    now = sample(3.0, 30)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(TimedMesh(3.0, replace(now.mesh, advice=(full, idle))), None))
    lines = [line.strip() for line in capture.get().splitlines()]
    assert lines[-3:-1] == ["add a decode worker: KV is full", "remove one of the prefill workers: they are idle"]


def test_while_no_router_answers_the_last_state_is_shown_with_the_error() -> None:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(replace(sample(3.0, 30), error="cannot reach 127.0.0.1:1"), sample(3.0, 30)))
    lines = [line.strip() for line in capture.get().splitlines()]
    assert lines[-2] == "no newer state: cannot reach 127.0.0.1:1"


def test_traffic_is_shown_below_the_workers() -> None:
    """v3 has no share any more, v2 no request yet; other routers have sent all those for `quiet`."""
    traffic = {"quiet": {"v2": 2.0}, "chat": {"v2": 1.0, "v1": 3.0}}
    routed = {"chat": tandem.RoutedRequests({"v1": 39, "v3": 1}, 40.2)}
    mesh = replace(sample(3.0, 30).mesh, traffic=traffic, routed=routed)
    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(TimedMesh(3.0, mesh), None))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[4:9] == [
        ["traffic", "revision", "share", "routed", "requests"],
        ["chat", "v1", "75", "%", "97.5", "%", "39", "in", "40", "s"],
        ["chat", "v2", "25", "%", "0", "%", "0", "in", "40", "s"],
        ["chat", "v3", "0", "%", "2.5", "%", "1", "in", "40", "s"],
        ["quiet", "v2", "100", "%", "0", "in", "0", "s"],
    ]


def test_the_workers_table_has_ranks_if_a_worker_has_several() -> None:
    console = Console(width=200)
    now = sample(3.0, 30)
    divided = replace(now.mesh.workers[1], tensor_parallel=4, pipeline_parallel=2)
    with console.capture() as capture:
        console.print(render(now, None))
        console.print(render(TimedMesh(3.0, replace(now.mesh, workers=(now.mesh.workers[0], divided))), None))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[0][-1] == "seen"
    assert [line[-1] for line in lines[4:7]] == ["ranks", "1x1", "4x2"]


def test_the_workers_table_has_adapters_if_a_worker_has_some() -> None:
    console = Console(width=200)
    now = sample(3.0, 30)
    workers = tuple(replace(worker, adapters=("french", "legal")) for worker in now.mesh.workers)
    with console.capture() as capture:
        console.print(render(TimedMesh(3.0, replace(now.mesh, workers=workers)), None))
    lines = [line.split() for line in capture.get().splitlines()]
    assert lines[0][-1] == "adapters"
    assert lines[1][-2:] == ["french,", "legal"]


def test_facts_of_an_answer() -> None:
    answer = StreamedAnswer(started_s=0.0)
    assert answer.summary() == "interrupted · 0 tokens"
    for number in range(3):
        last = number == 2
        reason = tandem.FinishReason.LENGTH if last else None
        answer.add(tandem.TokenEvent(0, tandem.Token(1, "a", 0.0), "r", finish_reason=reason))
    answer.first_s, answer.last_s = 0.25, 1.25
    assert answer.summary() == "length · 3 tokens · confidence 1.000 · first token 250 ms · 2.0 tokens/s"


def test_only_certainty_is_shown_as_one() -> None:
    assert [show_confidence(value) for value in (1.0, 0.99999, 0.9971, 0.0)] == ["1.000", "0.999", "0.997", "0.000"]


def test_a_conversation_alternates() -> None:
    conversation = Conversation(system="be brief")
    conversation.add_question("hi")
    conversation.add_answer("hello")
    conversation.add_question("lost")
    conversation.add_answer("")
    assert [turn["role"] for turn in conversation.messages()] == ["system", "user", "assistant"]


def test_commands_of_the_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    conversation = Conversation()
    conversation.add_question("hi")
    assert command("/system be kind ", conversation)
    assert command("/reset", conversation)
    assert conversation.messages() == [{"role": "system", "content": "be kind"}]
    assert command("/what", conversation)
    assert capsys.readouterr().err.startswith("there is no /what: /reset")
    assert not command("/quit", conversation)


def test_surer_is_greener() -> None:
    seen = [colour_of(math.log(probability)) for probability in (0.95, 0.7, 0.4, 0.2, 0.01)]
    assert seen == [colour for _, colour in SCALE]
    assert colour_of(0.0) == SCALE[0][1]
    assert colour_of(-math.inf) == SCALE[-1][1]


@pytest.mark.parametrize("colour", [colour for _, colour in SCALE])
def test_every_colour_can_be_read_on_black_and_on_white(colour: int) -> None:
    channels = [value / 255 for value in Color.from_ansi(colour).get_truecolor()]
    linear = [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    assert (luminance + 0.05) / 0.05 >= 3
    assert 1.05 / (luminance + 0.05) >= 3


def test_only_terminals_get_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert Painter.of(Console(file=io.StringIO())).paint("a", -0.01) == "a"
    assert Painter.of(Console(file=io.StringIO(), force_terminal=True)).paint("a", -0.01) == "\x1b[38;5;28ma\x1b[39m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Painter.of(Console(file=io.StringIO(), force_terminal=True)).paint("a", -0.01) == "a"


def test_a_model_cannot_drive_the_terminal() -> None:
    assert strip_controls("a\x1b[2Jb\n\tc\u00a0é") == "a\ufffd[2Jb\n\tc\u00a0é"
    assert Painter(is_terminal=False, use_colour=False).paint("\x1b", None) == "\x1b"


@pytest.mark.parametrize("width", [40, 80])
def test_a_table_that_is_too_wide_loses_nothing(width: int) -> None:
    """Its rows are lines of names and values, and no value is in two lines that fits in one."""
    table = Table("pid", "address", "in\nall", "logs", "", box=None, title="a title", caption="a caption")
    values = ("22865", "http://127.0.0.1:8080", "2 min", "/tmp/tandem-" + "x" * (width - 20), "")
    table.add_row(*values)
    table.add_row(Text("22866"), "", "[bold]3 min[/bold]", "/" + "y" * (2 * width), "last")
    console = Console(width=width)
    with console.capture() as capture:
        console.print(FittingTable(table))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert (lines[0], lines[-1]) == ("a title", "a caption")
    for name, value in zip(("pid", "address", "in all", "logs"), values, strict=False):
        assert any(f"{name} {value}" in line for line in lines), name
    assert "in all 3 min" in capture.get()
    assert capture.get().count("y") == 2 * width
    assert lines[-2].split(" · ")[-1].strip() == "last"


def test_a_table_that_fits_stays_a_table() -> None:
    table = Table("pid", "address", box=None, pad_edge=False)
    table.add_row("22865", "127.0.0.1:50051")
    outputs = []
    for shown in (table, FittingTable(table)):
        console = Console(width=len("22865  127.0.0.1:50051"))
        with console.capture() as capture:
            console.print(shown)
        outputs.append(capture.get())
    assert outputs[0] == outputs[1]
    assert outputs[0].splitlines()[1].rstrip() == "22865  127.0.0.1:50051"
