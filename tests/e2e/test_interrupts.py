"""Ctrl-C, SIGTERM and the signal of a closed terminal, at moments from the start on, for every program that people run:
no traceback, and no process and no file is left. `pytest -m soak` sweeps them all; the fast tests take a few.
"""

import asyncio
import fcntl
import os
import pty
import signal
import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

import tandem
from tandem_cli.model_files.model_folders import BUNDLED
from tests.e2e.mesh_process import START_S, STOP_S, is_alive
from tests.waiting import until

_LIMIT_S = 200.0
_MARK = "TANDEM_TEST_MARK"
_TROUBLE = ("Traceback", "Exception ignored", "KeyboardInterrupt", "never retrieved", "unhandled exception")
_MOMENTS_S = (0.05, 0.4, 1.5, 5.0, 15.0)
_FOUND_S = 0.1
"""CPU time after which Python has found the program, longer than the first moment on a busy machine. Until then a
signal meets Python's own code only.
"""
_INTERRUPT, _TERMINATE, _HANG_UP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP

_WORKER = "--model {model} --registry-address 127.0.0.1:9 --port 0"
_SERVICES = [
    "router --model {model} --port 0 --registry-port 0",
    f"decode_worker {_WORKER}",
    f"prefill_worker {_WORKER}",
    f"switchable_worker {_WORKER}",
    "gateway --router 127.0.0.1:9 --port 0",
    "tandem_cli up --port 0 --no-http",
    "tandem_cli up --port 0 --no-http --no-fork --colocated",
]
_WATCH = "tandem_cli workers --watch --address 127.0.0.1:9"
_ENDING = {
    "tandem_cli plan {model} --device h100-sxm": 0,
    "tandem_cli simulate --rate 8": 0,
    "tandem_cli quantize {model} {folder}/out --scheme gptq --data {prompts}": 0,
    "tandem_cli partition {model} {folder}/out --quantize int8": 0,
    "tandem_cli compile {model} --quantize int8": 0,
    "tandem_cli optimize {model} --data {prompts} --out {folder}/out": 0,
    "tandem_cli ps": 0,
    "tandem_cli generate hello --address 127.0.0.1:9": 1,  # no router is there
    "tandem_cli chat --address 127.0.0.1:9": 1,
    _WATCH: 1,
    "tandem_cli stop": 2,  # no mesh runs
    "tandem_cli logs": 2,
    "bench.attention --seqs 64": 0,
    "bench.limits --shape 135m": 0,
    "bench.speculative": 0,
    "bench.drafts --shape narrow": 0,
    "bench.overhead --tokens 2048 4096 8192": 0,
    "bench.sessions": 0,
    "tests.parity": 0,
    "tests.clients openai": 0,
}
"""Programs that may come to their end before the last signal, and their status then."""
_ENDLESS = [
    "tandem_cli bench --up=--colocated --num-requests 100000",
    "bench.step --shape narrow --repeats 1000",
    "bench.masks --vocab 32000 --seqs 8 --steps 1000000",
    "bench.families LlamaForCausalLM --rounds 1000",
    "bench.adapters --repeats 100000",
    "bench.loading --shape 135m --repeats 100",
    "bench.transfer --runs 10000",
    "bench.router --repeats 100",
    "bench.gateway --repeats 100 --streams 8",
    "bench.connections --idle 10 --dripping 10 --rounds 1000",
    "bench.serving --repeats 100",
    "bench.scale --workers 10 --streams 10 --seconds 100",
    "bench.peers.compare --arms tandem-colocated --repeats 100",
    "bench.peers.neighbours --arms tandem-colocated --repeats 100",
    "bench.peers.burst --arms tandem --repeats 100",
    "bench.peers.goodput --arms tandem --repeats 100",
    "bench.context --shape 135m --arms tandem --tokens 1024 --repeats 100",
]


@dataclass(frozen=True)
class Ended:
    """The end of a program: its status, stdout and stderr. `by_itself`: it had ended before it got a signal."""

    status: int
    by_itself: bool
    out: str
    err: str


async def ended(words: str, folder: Path, after_s: float, signals: Sequence[signal.Signals]) -> Ended:
    """Start `python -m WORDS`, send it the signals in quick succession as a terminal does, which are for children too,
    and check that neither a process nor a temporary file is left.
    """
    temporary, mark = folder / "tmp", uuid4().hex
    for each in (temporary, folder / "run"):
        each.mkdir(parents=True, exist_ok=True)
    (folder / "prompts.jsonl").write_text('{"prompt": "What is 2 + 3?"}\n' * 8)
    line = [word.format(model=BUNDLED, folder=folder, prompts=folder / "prompts.jsonl") for word in words.split()]
    environ = os.environ | {_MARK: mark, "TMPDIR": str(temporary), "XDG_RUNTIME_DIR": str(folder / "run")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *line),
        env=environ,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_heed_terminal,
    )
    told = asyncio.create_task(process.communicate())
    try:
        await asyncio.wait([told], timeout=after_s)
        await until(lambda: told.done() or _cpu_s(process) >= _FOUND_S, state=lambda: _cpu_s(process))
        by_itself = told.done()
        for number in signals:
            _signal_group(process, number)
        late = not (await asyncio.wait([told], timeout=_LIMIT_S))[0]
    finally:
        _signal_group(process, signal.SIGKILL)
        out, err = await told
    assert not late, f"it has not ended {_LIMIT_S:g} s after the signal: {out.decode()}{err.decode()}"
    await until(lambda: not _marked(mark), state=lambda: _marked(mark))
    assert process.returncode is not None
    assert _files_in(temporary) == []
    return Ended(process.returncode, by_itself, out.decode(), err.decode())


def _files_in(temporary: Path) -> list[str]:
    """Names, without the cache that PyTorch keeps."""
    return [path.name for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]


def _cpu_s(process: asyncio.subprocess.Process) -> float:
    with suppress(psutil.Error):
        times = psutil.Process(process.pid).cpu_times()
        return float(times.user + times.system)
    return _FOUND_S


def _signal_group(process: asyncio.subprocess.Process, number: int) -> None:
    with suppress(ProcessLookupError):  # it has ended, which asyncio may tell later
        os.killpg(process.pid, number)


def _heed_terminal() -> None:
    for number in (_INTERRUPT, _HANG_UP):  # a shell has ignored them if pytest is a background job
        signal.signal(number, signal.SIG_DFL)


def _marked(mark: str) -> list[psutil.Process]:
    """Running processes that have inherited the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(_MARK) == mark and is_alive(process):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _check(end: Ended, words: str, signals: Sequence[signal.Signals]) -> None:
    assert [text for text in _TROUBLE if text in end.err + end.out] == [], end
    statuses = {_ENDING[words]} if words in _ENDING else set()  # it may have ended while the signal was on its way
    if not end.by_itself:
        statuses |= {status for number in signals for status in (-number, 128 + number)}
        if words in _SERVICES or (words == _WATCH and _INTERRUPT in signals):  # a signal is how they are ended
            statuses.add(0)
    assert end.status in statuses, end


@pytest.mark.parametrize("signals", [(_INTERRUPT,), (_INTERRUPT, _INTERRUPT), (_TERMINATE,), (_HANG_UP,)], ids=str)
@pytest.mark.parametrize("words", [_SERVICES[0], _SERVICES[4], "bench.attention", "tandem_cli simulate --rate 8"])
async def test_a_program_that_starts_ends_without_a_traceback(
    words: str, signals: Sequence[signal.Signals], tmp_path: Path
) -> None:
    ends = await asyncio.gather(*(ended(words, tmp_path / str(after_s), after_s, signals) for after_s in (0.1, 0.9)))
    for end in ends:
        _check(end, words, signals)


async def test_a_mesh_whose_terminal_is_closed_completes_its_answers(tmp_path: Path) -> None:
    """Closing the window of `tandem up` stops it as Ctrl-C does: streams end, no process and no file is left."""
    master, terminal = pty.openpty()
    (tmp_path / "tmp").mkdir()
    environ = os.environ | {"TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path)}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "up", "--port", "0", "--no-http", "--colocated"),
        *("--grace-s", str(START_S), "--drain-grace-s", str(START_S)),  # router and workers of a busy machine
        env=environ,
        stdin=terminal,
        stdout=asyncio.subprocess.PIPE,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(terminal)
    assert process.stdout is not None
    shown = asyncio.create_task(_read_terminal(master))
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        assert line.startswith(b"ready "), (line, shown)
        services = psutil.Process(process.pid).children(recursive=True)
        async with tandem.AsyncClient(line.decode().split()[1]) as client:
            stream = client.stream(prompt="Tell me of a tower.", max_new_tokens=400, ignore_eos=True)
            tokens = [await anext(stream)]
            shown.cancel()
            os.close(master)
            tokens += [token async for token in stream]
        assert len(tokens) == 400
        assert await asyncio.wait_for(process.wait(), STOP_S) == 0
    finally:
        _signal_group(process, signal.SIGKILL)
        shown.cancel()
        await process.wait()
    assert [service for service in services if is_alive(service)] == []
    assert _files_in(tmp_path / "tmp") == []


def _take_terminal() -> None:
    """Make the terminal on stdin the one of this session, whose end is a signal to it."""
    _heed_terminal()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def _read_terminal(master: int) -> None:
    loop = asyncio.get_running_loop()
    loop.add_reader(master, os.read, master, 4096)
    try:
        await asyncio.Event().wait()
    finally:
        loop.remove_reader(master)


@pytest.mark.soak
@pytest.mark.timeout(1800)  # 25 starts and ends; Ctrl-C waits for LLVM while kernels are compiled, which happens once
@pytest.mark.parametrize("words", [*_SERVICES, *_ENDING, *_ENDLESS])
async def test_every_program_at_every_moment(words: str, tmp_path: Path) -> None:
    for signals in (
        (_INTERRUPT,),
        (_INTERRUPT, _INTERRUPT),
        (_TERMINATE,),
        (_TERMINATE, _INTERRUPT),
        (_HANG_UP, _HANG_UP),
    ):
        for after_s in _MOMENTS_S:
            folder = tmp_path / f"{after_s:g} {'-'.join(number.name for number in signals)}"
            _check(await ended(words, folder, after_s, signals), words, signals)
