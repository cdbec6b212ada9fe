"""The stages of `make test-gpu`. `tests.gpu.plan` runs each in a process of its own.

A stage works for about so many seconds, returns its figures, and fails by an exception. On CPU it does the same with
small shapes, and with Triton's interpreter, so that a mistake in it costs no time on a GPU.
"""

import asyncio
import json
import os
import platform
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from mesh.domain.kv import KVLayout
from tests.gpu.chunks import arena_of, best_s, chunk_on, copying, gb_s

if TYPE_CHECKING:
    import tandem
    from tests.e2e.mesh_process import MeshProcess

Figures = dict[str, object]
Item = TypeVar("Item")
PARITY_FAMILIES = ("llama", "mixtral", "qwen2-window", "gemma2", "bloom", "mistral", "gpt2")
_PACKAGES = ("torch", "triton", "flash-attn", "transformers", "numba", "grpcio")
_CHUNK_BYTES = 8 << 20  # as workers send KV
_INTERPRETED = ("attention", "parity", "attention_times")  # on CPU
_NUM_STREAMED = 300  # tokens of a stream, so that none ends before all have begun


def facts(device: torch.device, seconds: float) -> Figures:
    """Versions, the device, and the most that it can copy and multiply."""
    figures: Figures = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            figures[name] = version(name)
        except PackageNotFoundError:
            figures[name] = "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        figures["cuda"] = torch.version.cuda
        figures["capability"] = f"{properties.major}.{properties.minor}"
        figures["memory_gib"] = round(properties.total_memory / 2**30, 1)
    return figures | {"copy_gb_s": _copy_gb_s(device), "bf16_tflops": _bf16_tflops(device)}


def attention(device: torch.device, seconds: float) -> Figures:
    """The Triton kernels against torch in fp32, those of experts last."""
    from tests.component.without_gpu.paged_attention import TOLERANCES, change_beside_others, difference
    from tests.gpu.cases import alone_case, cases

    every, worst = cases(device), dict.fromkeys(TOLERANCES, 0.0)
    wrong: list[str] = []
    num_done = 0
    for case in _until(0.8 * seconds, every):
        try:
            found = difference(case, device)
        except (AssertionError, RuntimeError) as error:  # the others still tell something
            wrong.append(f"{case}: {error}")
            continue
        num_done += 1
        worst[case.dtype] = max(worst[case.dtype], found)
        if found > TOLERANCES[case.dtype]:
            wrong.append(f"{case}: differs by {found}")
    changes = {num_drafts: change_beside_others(alone_case(device), num_drafts, device) for num_drafts in (0, 3)}
    if changes[0]:
        wrong.append(f"a token changes by {changes[0]} with the batch")
    of_experts = _experts(device, 0.2 * seconds, wrong)
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} cases are wrong, {num_done} ran", *wrong]))
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in worst}
    largest = {f"largest difference, {names[dtype]}": f"{value:.1e}" for dtype, value in worst.items() if value}
    return {"cases": f"{num_done} of {len(every)}", "change of a token after drafts": changes[3]} | largest | of_experts


def _experts(device: torch.device, seconds: float, wrong: list[str]) -> Figures:
    """The kernels of experts against torch in fp32. Cases that differ too much are added to `wrong`."""
    from tests.component.without_gpu.expert_cases import TOLERANCES, difference
    from tests.gpu.cases import expert_cases

    worst: dict[torch.dtype, float] = {}
    for case in _until(seconds, expert_cases(device)):
        try:
            found = difference(case, device)
        except RuntimeError as error:  # the others still tell something
            wrong.append(f"{case}: {error}")
            continue
        worst[case.dtype] = max(worst.get(case.dtype, 0.0), found)
        if found > TOLERANCES[case.dtype]:
            wrong.append(f"{case}: differs by {found}")
    return {f"experts, {str(dtype).removeprefix('torch.')}": f"{value:.1e}" for dtype, value in worst.items()}


def parity(device: torch.device, seconds: float) -> Figures:
    """Families against transformers in fp32, with each attention backend that can run."""
    from engine.loading.load_runner import load_model_runner
    from engine.runner_settings import RunnerSettings
    from tests.component.checkpoints import build_checkpoint
    from tests.component.parity import check_parity

    right, wrong = [], []
    for family, name in _until(seconds, [(f, name) for f in PARITY_FAMILIES for name in ("triton", "torch")]):
        with tempfile.TemporaryDirectory() as folder:
            model_dir = build_checkpoint(family, Path(folder))
            wanted = RunnerSettings(model_dir, device=str(device), dtype="float32", num_blocks=64, attention=name)
            try:
                check_parity(model_dir, load_model_runner(wanted))
                right.append(f"{family} ({name})")
            except Exception as error:  # the others still tell something
                wrong.append(f"{family} ({name}): {error!r}"[:300])
    if wrong:
        raise AssertionError("\n".join([f"right: {', '.join(right)}", *wrong]))
    return {"same tokens and log-probs as transformers": ", ".join(right)}


def mesh(device: torch.device, seconds: float) -> Figures:
    """A prefill worker and two decode workers on one device answer what the bundled model knows. When one of the latter
    is killed in the middle of its streams, nobody can tell.
    """
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_ask_mesh(device, Path(folder)))


async def _ask_mesh(device: torch.device, log_dir: Path) -> Figures:
    import tandem
    from tests.e2e import mesh_process
    from tests.e2e.test_bundled_model import QUESTIONS

    begun_s = time.monotonic()
    # In fp32: in 16 bits a prompt's kernels, which a replay needs, may choose another token than those of decode steps.
    dtypes = ("--set", "prefill.dtype=float32", "--set", "decode.dtype=float32")
    flags = ("--device", str(device), "--prefill", "1", "--decode", "2", *dtypes)
    started = mesh_process.mesh("tandem-small", log_dir, *flags)
    async with started as running, tandem.AsyncClient(running.address) as client:
        start_s, num_right, first_token_s = time.monotonic() - begun_s, 0, []
        for question, answer in QUESTIONS.items():
            asked_s = time.monotonic()
            result = await client.generate(messages=[{"role": "user", "content": question}], max_new_tokens=60)
            first_token_s.append(time.monotonic() - asked_s)
            num_right += answer in result.text.lower()
        sent = sum(worker.transferred_bytes for worker in await client.workers() if worker.role == "prefill")
        num_exact = await _kill_in_the_middle(running, client)
    if num_right < len(QUESTIONS) - 1 or not sent:
        raise AssertionError(f"{num_right} of {len(QUESTIONS)} answers are right, {sent} bytes of KV were sent")
    return {
        "right answers": f"{num_right} of {len(QUESTIONS)}",
        "KV sent, KB": sent // 1000,
        "start, s": round(start_s, 1),
        "shortest answer, ms": round(1000 * min(first_token_s)),
        "streams exact after kill -9": num_exact,
    }


async def _kill_in_the_middle(running: "MeshProcess", client: "tandem.AsyncClient") -> int:
    """Kill a decode worker that streams. Returns the number of streams: all got the tokens that they get when nobody is
    killed. Raises AssertionError.
    """
    from tests.e2e.in_middle import stream_and_hit

    asked: dict[str, Any] = {"max_new_tokens": _NUM_STREAMED, "ignore_eos": True}
    requests = [asked | {"token_ids": [*range(40 + 9 * i)], "temperature": 0.8 * (i % 2), "seed": i} for i in range(4)]
    wanted = await asyncio.gather(*(client.generate(**request) for request in requests))
    streams, pid = await stream_and_hit(client, requests, lambda: running.signal("decode_worker", signal.SIGKILL))
    for number, (events, result) in enumerate(zip(streams, wanted, strict=True)):
        tokens = [event.token for event in events]
        if [token and token.id for token in tokens] != [token.id for token in result.tokens]:
            raise AssertionError(f"stream {number} has other tokens after worker {pid} was killed")
    return len(streams)


def copies(device: torch.device, seconds: float) -> Figures:
    """KV blocks between the device and host memory, as transfers copy them; and the most that one copy can do."""
    chunk = chunk_on(device)
    with arena_of(2 * chunk.num_bytes) as arena:
        unpin, places = chunk.cache.pin(arena.view(0, arena.num_bytes)), chunk.places(arena)
        is_pinned = torch.frombuffer(places[0], dtype=torch.uint8).is_pinned()
        for _ in _until(seconds / 3, range(30)):
            chunk.require_right_copies(places[0])
        figures: Figures = {"arena is pinned": is_pinned, "to the arena, GB/s": chunk.read_gb_s(places[0])}
        with copying(chunk, places) as copied:
            time.sleep(seconds / 10)
        figures["by two threads, GB/s"] = copied.gb_s
        unpin()
        places.clear()
    payload = bytes(chunk.num_bytes)
    figures["to other memory, GB/s"] = chunk.read_gb_s(bytearray(chunk.num_bytes))
    write_s = best_s(device, lambda: chunk.cache.write_blocks(chunk.ids, chunk.span, payload))
    figures["to device, GB/s"] = gb_s(chunk.num_bytes, write_s)
    if device.type == "cuda":
        on_device = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=device)
        pinned = torch.empty(chunk.num_bytes, dtype=torch.uint8, pin_memory=True)
        figures["one pinned copy to host, GB/s"] = gb_s(
            chunk.num_bytes, best_s(device, lambda: pinned.copy_(on_device))
        )
    return figures


def prefill_to_decode(device: torch.device, seconds: float) -> Figures:
    """KV from the cache of one process to that of another on the same device, as a prefill worker sends it to a decode
    worker: copied, checksummed, verified and committed.
    """
    from rich.table import Table

    from bench.transfer import LAYOUT, TransferBenchPlan, measure_own

    num_tokens, num_runs = (4096, 20) if device.type == "cuda" else (64, 1)
    num_bytes = LAYOUT.num_blocks_for(num_tokens) * LAYOUT.block_bytes
    figures: Figures = {"KV, MB": round(num_bytes / 1e6, 1)}
    for transport in _until(seconds, ("shm", "grpc")):
        wanted = TransferBenchPlan((transport,), (num_tokens,), num_runs, _CHUNK_BYTES, device=str(device))
        [median_ms] = asyncio.run(measure_own(wanted, Table(*map(str, range(10))))).values()
        figures[f"by {transport}, GB/s"] = gb_s(num_bytes, median_ms / 1e3)
    return figures


def copies_beside_steps(device: torch.device, seconds: float) -> Figures:
    """Milliseconds of a decode step while two threads copy KV to the host, as fast as they can, and without."""
    from bench.shapes import write_shape
    from tandem_cli.capacity.measurement import EngineSteps, StepWorkload
    from tandem_cli.model_files.model_folders import BUNDLED

    is_large = device.type == "cuda"
    chunk, rates = chunk_on(device), []
    found: dict[str, list[float]] = {"alone": [], "beside copies": []}
    with arena_of(2 * chunk.num_bytes) as arena:
        with tempfile.TemporaryDirectory() as folder:
            model_dir = write_shape("0.5b", Path(folder)) if is_large else BUNDLED
            batch, dtype = (32, "bfloat16") if is_large else (1, "float32")
            measured = EngineSteps(StepWorkload(model_dir, "none", batch, 256, 256, num_threads=2, dtype=dtype))
            measured.decode_ms(batch)
        unpin, places = chunk.cache.pin(arena.view(0, arena.num_bytes)), chunk.places(arena)
        for _ in _until(seconds / 2, range(10)):
            found["alone"].append(measured.decode_ms(batch))
            with copying(chunk, places) as copied:
                found["beside copies"].append(measured.decode_ms(batch))
            rates.append(copied.gb_s)
        unpin()
        places.clear()
    alone, beside = (statistics.median(times) for times in found.values())
    return {
        f"{model_dir.name}, step of {batch}, ms": round(alone, 2),
        "beside copies, ms": round(beside, 2),
        "ratio": round(beside / alone, 3),
        "copied meanwhile, GB/s": statistics.median(rates),
    }


def steps(device: torch.device, seconds: float) -> Figures:
    """Milliseconds of a prompt and of decode steps, without a mesh; and how much graphs save of a step of one."""
    from bench.shapes import write_shape
    from tandem_cli.capacity.measurement import EngineSteps, StepWorkload
    from tandem_cli.model_files.model_folders import BUNDLED

    is_large = device.type == "cuda"
    dtype, batches = ("bfloat16", (1, 8, 32)) if is_large else ("float32", (1,))
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        small = BUNDLED
        models = [write_shape(name, Path(folder)) for name in ("135m", "0.5b")] if is_large else [small]
        for model_dir in _until(seconds, models):
            # Two threads: times of one are its CPU time, which does not contain what the device does.
            workload = StepWorkload(model_dir, "none", max(batches), 256, 256, num_threads=2, dtype=dtype)
            measured = EngineSteps(workload)
            measured.prompt_ms()
            figures[f"{model_dir.name}, prompt of 256, ms"] = round(measured.prompt_ms(), 2)
            times = {batch: measured.decode_ms(batch) for batch in batches}
            figures |= {f"{model_dir.name}, step of {batch}, ms": round(ms, 2) for batch, ms in times.items()}
            del measured
            eager_ms = EngineSteps(replace(workload, max_batch=1, enforce_eager=True)).decode_ms(1)
            figures[f"{model_dir.name}, step of 1 with graphs / without"] = round(times[1] / eager_ms, 3)
    return figures


def attention_times(device: torch.device, seconds: float) -> Figures:
    """Milliseconds of one layer's attention by backend and block size: decodes, and a prompt; and of its experts,
    by kernels and by the host.
    """
    from engine.attention.select import AttentionTarget, available_backends, select_backend
    from tests.component.without_gpu.paged_attention import random_inputs
    from tests.gpu.cases import timed_cases

    figures: Figures = {}
    for name, case in _until(0.7 * seconds, timed_cases(device)):
        shape = case.shape
        dtype = str(case.dtype).removeprefix("torch.")
        layout = KVLayout("m", 1, shape.num_kv_heads, shape.head_dim, case.block_size, dtype)
        target, given = AttentionTarget(device, case.dtype, layout), random_inputs(case, device)
        given.cache.nan_to_num_()  # torch reads what it masks
        for backend_name in available_backends(shape, target):
            backend = select_backend(shape, target, backend_name)
            arguments = (given.queries, given.keys, given.values, given.cache, case.window)
            # Masks are made once per step and kept in the metadata, as for the layers of a model.
            seconds_each = best_s(device, partial(backend.attend, *arguments, given.metadata))
            figures[f"{name}, {backend_name}, blocks of {case.block_size}, ms"] = round(1e3 * seconds_each, 3)
    return figures | _expert_times(device, 0.3 * seconds)


def _expert_times(device: torch.device, seconds: float) -> Figures:
    from tests.component.without_gpu.expert_cases import random_experts, random_rows
    from tests.gpu.cases import timed_experts

    figures: Figures = {}
    for name, case in _until(seconds, timed_experts(device)):
        layer, x = random_experts(case, device), random_rows(case, device)
        for by, are_used in (("kernels", True), ("the host", False)):
            layer._on_device.products.fit_step = are_used  # type: ignore[union-attr]
            figures[f"{name}, {case.num_rows} rows by {by}, ms"] = round(1e3 * best_s(device, partial(layer, x)), 3)
    return figures


def _copy_gb_s(device: torch.device) -> float:
    source = torch.ones(2**28 if device.type == "cuda" else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return gb_s(2 * 4 * len(source), best_s(device, lambda: target.copy_(source)))


def _bf16_tflops(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 128
    left = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    return round(2 * size**3 / best_s(device, lambda: left @ left) / 1e12, 1)


def _until(seconds: float, items: Iterable[Item]) -> Iterator[Item]:
    """The items, at least one, until the time has passed."""
    end_s = time.monotonic() + seconds
    for item in items:
        yield item
        if time.monotonic() > end_s:
            return


_IN_ORDER = (
    *(facts, attention, parity, mesh, copies, prefill_to_decode),
    *(steps, copies_beside_steps, attention_times),
)
STAGES: dict[str, Callable[[torch.device, float], Figures]] = {stage.__name__: stage for stage in _IN_ORDER}


def run_stage(name: str, device: str, seconds: float, out: Path, said: Path) -> None:
    """Run a stage in this process, which gets a process group of its own, so that its mesh ends with it. Writes its
    figures to `out` as JSON, and what it says to `said`.
    """
    os.setsid()
    with said.open("wb") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
        torch.set_num_threads(1)  # as many as small shapes can use
        if name in _INTERPRETED:
            import_module("tests.component.without_gpu.quick_interpreter")
    torch.set_float32_matmul_precision("highest")  # what is compared to: containers of NVIDIA allow TF32
    out.write_text(json.dumps(STAGES[name](torch.device(device), seconds)))
