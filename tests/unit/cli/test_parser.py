"""The command line: help, wrong words, what a command imports, and completion."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from mesh.settings import flag_name
from tandem_cli.configuration.up_arguments import models_of
from tandem_cli.configuration.up_settings import UpSettings, passed_on
from tandem_cli.main import COMMANDS, main, parse_arguments

FIRST = 12
"""At most so many options are in the help of `tandem up`."""


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What the command prints before it exits."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    captured = capsys.readouterr()
    return f"{ended.value.code} {captured.out}{captured.err}"


def test_no_command_is_a_question_for_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys)
    assert text.startswith("2 usage: tandem COMMAND")
    assert set(re.findall(r"^  ([a-z]+)  ", text, re.MULTILINE)) == COMMANDS.keys()
    assert shown(capsys, "--help") == text.replace("2 ", "0 ", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["genrate"], "2 tandem: there is no command 'genrate'; did you mean generate? (see: tandem --help)\n"),
        (["up", "--httpport=1"], "there is no option --httpport; did you mean --http-port? (see: tandem up --help)\n"),
        (
            ["serve", "--max-roling-batch-size", "1"],
            "mean --max-rolling-batch-size? (see: tandem serve --help)",
        ),
        (
            ["keys", "new", "me", "--operater"],
            "option --operater; did you mean --operator? (see: tandem keys new ",
        ),
        (["workers", "decode-0"], "2 tandem workers: unexpected argument 'decode-0' (see: tandem workers --help)\n"),
        (["up", "--max-num-seqs", "8"], "there is no option --max-num-seqs; here it is --max-rolling-batch-size (see:"),
        (["up", "--tensor-parallel-size=2"], "--tensor-parallel-size; here it is --tensor-parallel (see"),
        (["serve", "--max-num-batched-tokens", "1"], "here it is --max-batch-prefill-tokens (see"),
        (["up", "--gpu-memory-utilization", "1"], "here it is --memory-utilization (see"),
        (["up", "--served-model-name", "m"], "here it is --name (see"),
        (["up", "--kv-cache-dtype", "m"], "here it is --kv-dtype (see"),
        (["up", "--num-shard", "2"], "here it is --tensor-parallel (see"),
        (["up", "--max-concurrent-request", "2"], "did you mean --max-concurrent-requests? (see"),
        (
            ["up", "--swap-space", "4"],
            "--swap-space, which would have no effect: a sequence that has lost its KV is",
        ),
        (["bench", "--max-num-seqs", "8"], "2 tandem bench: there is no option --max-num-seqs"),
        (["workers", "--addr", "x"], "there is no option --addr; did you mean --address?"),
        (["bench", "--xyz"], "2 tandem bench: there is no option --xyz (see: tandem bench --help)\n"),
    ],
)
def test_wrong_words_are_answered_with_what_was_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, *words)
    assert said in text
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["batch", "in", "out", "--timeout"], "argument --timeout: must be > 0"),
        (["batch", "in", "out", "--patience"], "argument --patience: must be >= 0"),
        (["stop", "--timeout"], "argument --timeout: must be >= 0"),
        (["bench", "--burst-lead"], "argument --burst-lead: must be >= 0"),
        (["simulate", "--slo-ttft-ms"], "argument --slo-ttft-ms: must be > 0"),
        (["simulate", "--slo-tpot-ms"], "argument --slo-tpot-ms: must be > 0"),
    ],
)
@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_times_that_are_none_are_refused(
    words: list[str], said: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    *others, option = words
    assert f"{said}, got {value}" in shown(capsys, *others, f"{option}={value}")


def test_a_batch_of_pipes_is_refused_before_it_waits_for_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, file = tmp_path / "pipe", tmp_path / "file"
    os.mkfifo(pipe)
    file.write_text("")
    for words in ((pipe, file), (file, pipe), (file, Path("/dev/full"))):
        assert main(["batch", *map(str, words)]) == 2
        assert "is no regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "models", "colocated"),
    [
        (["a"], ["a"], None),
        (["a=x", "b=y", "--port", "0"], ["a=x", "b=y"], None),
        (["--port", "0", "a"], ["a"], None),
        (["a=x", "--model", "b=y"], ["a=x", "b=y"], None),
        (["--colocated", "a"], ["a"], "true"),
        (["--colocated", "no", "a"], ["a"], "no"),
        (["--colocated=false", "a"], ["a"], "false"),
        (["a", "--colocated"], ["a"], "true"),
        (["--colocated", "--port", "0"], [], "true"),
    ],
)
@pytest.mark.parametrize("command", ["up", "serve"])
def test_models_are_named_by_position(command: str, words: list[str], models: list[str], colocated: str | None) -> None:
    args = parse_arguments([command, *words])
    assert models_of(args) == models
    assert getattr(args, "colocated", None) == colocated


def test_help_shows_what_people_need_first_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {flag_name(field.name) for field in fields(UpSettings) if not field.metadata["secret"]}
    flags |= {flag_name(name) for name in passed_on()}
    first, everything = shown(capsys, "up", "--help"), shown(capsys, "up", "--help-all")
    options = [set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE)) for text in (first, everything)]
    assert len(options[0]) <= FIRST
    assert options[1] == flags | {"--help-all", "--config", "--set", "--serving-properties"}
    assert not re.search(r"VALUE\b(?<!KEY=VALUE)|None", everything)


def test_help_tells_roles_apart_that_differ_in_a_default(capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(shown(capsys, "up", "--help-all").split())
    told = words.partition("--slow-reader-s SECONDS ")[2]
    assert re.match(r"router: [^;]+ \(default 20\.0\); gateway: [^;]+ \(default 30\.0\) ", told)


def test_help_imports_no_engine() -> None:
    """One process for all commands. `tandem --help` alone imports nothing that takes long."""
    code = """
import contextlib, io, sys
from tandem_cli.main import COMMANDS, main
with contextlib.redirect_stdout(io.StringIO()):
    for words in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with contextlib.suppress(SystemExit):
            main(words)
        if words == ["--help"]:
            early = {"grpc", "rich", "numpy", "asyncio"} & sys.modules.keys()
print(early, {"torch", "numba", "llvmlite", "transformers"} & sys.modules.keys())
"""
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "set() set()\n"


@pytest.mark.parametrize("module", ["tandem_cli.parser", "rich.console"])
def test_ctrl_c_during_the_start_leaves_no_traceback(module: str) -> None:
    command = (sys.executable, "-X", "importtime", "-m", "tandem_cli", "models", "--address", "127.0.0.1:1")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while module not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        process.send_signal(2)
        rest = process.stderr.read()
    assert "Traceback" not in rest
    assert process.returncode in (-2, 130)


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    (tmp_path / "tandem").write_text(f'#!/bin/sh\nexec {sys.executable} -m tandem_cli "$@"\n')
    (tmp_path / "tandem").chmod(0o755)
    script = """
eval "$(tandem completion bash)"
complete_line() {
    COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMPREPLY=()
    _python_argcomplete tandem
    echo "${COMPREPLY[@]}"
}
complete_line "tandem brea"
complete_line "tandem up --max-rolling"
"""
    environ = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(("bash", "-c", script), env=environ, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["breakdown", "--max-rolling-batch-size"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_there_is_a_script_for_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "tandem" in text
    assert ("complete --command tandem" in text) == (shell == "fish")
