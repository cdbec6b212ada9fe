"""The stages of `make test-gpu`. Each runs in a process of its own: python -m tests.gpu.stages NAME DEVICE SECONDS OUT

A stage works for about SECONDS, writes its figures to OUT as JSON, and fails by an exception. On CPU it does the same
with small shapes, and with Triton's interpreter, so that a mistake in it costs no time on a GPU.
"""

import asyncio
import json
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from engine.kv_cache import KVCache
from mesh.domain.kv import KVLayout, KVSpan, Span
from mesh.interrupts import run_program

if TYPE_CHECKING:
    from kvtransfer.transports.shm import Arena

Figures = dict[str, object]
Item = TypeVar("Item")
PARITY_FAMILIES = ("llama", "qwen2-window", "gemma2", "bloom", "mistral", "gpt2")
_PACKAGES = ("torch", "triton", "flash-attn", "transformers", "numba", "grpcio")
_REPEATS = 20
_SLOW = {"cuda": (8192, 8192), "cpu": (64, 64)}  # a product of such matrices lets the device be late


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
    """The Triton kernels against torch in fp32."""
    from tests.component.paged_attention import TOLERANCES, change_beside_others, difference
    from tests.gpu.cases import alone_case, cases

    every, worst = cases(device), dict.fromkeys(TOLERANCES, 0.0)
    wrong: list[str] = []
    num_done = 0
    for case in _until(seconds, every):
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
    if wrong:
        raise AssertionError("\n".join([f"{len(wrong)} cases are wrong, {num_done} ran", *wrong]))
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in worst}
    largest = {f"largest difference, {names[dtype]}": f"{value:.1e}" for dtype, value in worst.items() if value}
    return {"cases": f"{num_done} of {len(every)}", "change of a token after drafts": changes[3]} | largest


def parity(device: torch.device, seconds: float) -> Figures:
    """Families against transformers in fp32, with each attention backend that can run."""
    from engine.load_runner import load_model_runner
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
    """A prefill and a decode worker on one device answer what the bundled model knows."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_ask_mesh(device, Path(folder)))


async def _ask_mesh(device: torch.device, log_dir: Path) -> Figures:
    import tandem
    from tests.e2e import mesh_process
    from tests.e2e.test_bundled_model import QUESTIONS

    begun_s = time.monotonic()
    flags = ("--device", str(device), "--prefill", "1", "--decode", "1")
    started = mesh_process.mesh("tandem-small", log_dir, *flags)
    async with started as running, tandem.AsyncClient(running.address) as client:
        start_s, num_right, first_token_s = time.monotonic() - begun_s, 0, []
        for question, answer in QUESTIONS.items():
            asked_s = time.monotonic()
            result = await client.generate(messages=[{"role": "user", "content": question}], max_new_tokens=60)
            first_token_s.append(time.monotonic() - asked_s)
            num_right += answer in result.text.lower()
        sent = sum(worker.transferred_bytes for worker in await client.workers() if worker.role == "prefill")
    if num_right < len(QUESTIONS) - 1 or not sent:
        raise AssertionError(f"{num_right} of {len(QUESTIONS)} answers are right, {sent} bytes of KV were sent")
    return {
        "right answers": f"{num_right} of {len(QUESTIONS)}",
        "KV sent, KB": sent // 1000,
        "start, s": round(start_s, 1),
        "shortest answer, ms": round(1000 * min(first_token_s)),
    }


def copies(device: torch.device, seconds: float) -> Figures:
    """KV blocks between the device and host memory, as transfers copy them; and the most that one copy can do."""
    chunk = _chunk(device)
    with _arena(2 * chunk.num_bytes) as arena:
        unpin, places = chunk.cache.pin(arena.view(0, arena.num_bytes)), chunk.places(arena)
        is_pinned = torch.frombuffer(places[0], dtype=torch.uint8).is_pinned()
        for _ in _until(seconds / 3, range(30)):
            chunk.require_right_copies(places[0])
        figures: Figures = {"arena is pinned": is_pinned, "to the arena, GB/s": chunk.read_gb_s(places[0])}
        with _copying(chunk, places) as copied:
            time.sleep(seconds / 10)
        figures["by two threads, GB/s"] = copied.gb_s
        unpin()
        places.clear()
    payload = bytes(chunk.num_bytes)
    figures["to other memory, GB/s"] = chunk.read_gb_s(bytearray(chunk.num_bytes))
    write_s = _best_s(device, lambda: chunk.cache.write_blocks(chunk.ids, chunk.span, payload))
    figures["to device, GB/s"] = _gb_s(chunk.num_bytes, write_s)
    if device.type == "cuda":
        on_device = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=device)
        pinned = torch.empty(chunk.num_bytes, dtype=torch.uint8, pin_memory=True)
        figures["one pinned copy to host, GB/s"] = _gb_s(
            chunk.num_bytes, _best_s(device, lambda: pinned.copy_(on_device))
        )
    return figures


@contextmanager
def _arena(num_bytes: int) -> "Iterator[Arena]":
    """A sender's shared memory. It belongs to an event loop."""
    from kvtransfer.transports.shm import Arena

    async def make() -> Arena:
        return Arena("/dev/shm", num_bytes)

    with asyncio.Runner() as runner:
        arena = runner.run(make())
        try:
            yield arena
        finally:
            arena.close()


def copies_beside_steps(device: torch.device, seconds: float) -> Figures:
    """Milliseconds of a decode step while two threads copy KV to the host, as fast as they can, and without."""
    from bench.shapes import write_shape
    from tandem_cli.capacity.measurement import EngineSteps, StepWorkload
    from tandem_cli.deployment import BUNDLED_MODELS

    is_large = device.type == "cuda"
    chunk, rates = _chunk(device), []
    found: dict[str, list[float]] = {"alone": [], "beside copies": []}
    with _arena(2 * chunk.num_bytes) as arena:
        with tempfile.TemporaryDirectory() as folder:
            model_dir = write_shape("0.5b", Path(folder)) if is_large else BUNDLED_MODELS / "tandem-small"
            batch, dtype = (32, "bfloat16") if is_large else (1, "float32")
            measured = EngineSteps(StepWorkload(model_dir, "none", batch, 256, 256, num_threads=2, dtype=dtype))
            measured.decode_ms(batch)
        unpin, places = chunk.cache.pin(arena.view(0, arena.num_bytes)), chunk.places(arena)
        for _ in _until(seconds / 2, range(10)):
            found["alone"].append(measured.decode_ms(batch))
            with _copying(chunk, places) as copied:
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
    from tandem_cli.deployment import BUNDLED_MODELS

    is_large = device.type == "cuda"
    dtype, batches = ("bfloat16", (1, 8, 32)) if is_large else ("float32", (1,))
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        small = BUNDLED_MODELS / "tandem-small"
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
    """Milliseconds of one layer's attention by backend and block size: decodes, and a prompt."""
    from engine.attention.select import AttentionTarget, available_backends, select_backend
    from mesh.domain.kv import KVLayout
    from tests.component.paged_attention import random_inputs
    from tests.gpu.cases import timed_cases

    figures: Figures = {}
    for name, case in _until(seconds, timed_cases(device)):
        shape = case.shape
        dtype = str(case.dtype).removeprefix("torch.")
        layout = KVLayout("m", 1, shape.num_kv_heads, shape.head_dim, case.block_size, dtype)
        target, given = AttentionTarget(device, case.dtype, layout), random_inputs(case, device)
        given.cache.nan_to_num_()  # torch reads what it masks
        for backend_name in available_backends(shape, target):
            backend = select_backend(shape, target, backend_name)
            arguments = (given.queries, given.keys, given.values, given.cache, case.window)
            # Masks are made once per step and kept in the metadata, as for the layers of a model.
            best_s = _best_s(device, partial(backend.attend, *arguments, given.metadata))
            figures[f"{name}, {backend_name}, blocks of {case.block_size}, ms"] = round(1e3 * best_s, 3)
    return figures


@dataclass(frozen=True)
class _Chunk:
    """As many blocks as a transfer copies at once, scattered, and their cache."""

    cache: KVCache
    ids: list[int]
    span: KVSpan

    @property
    def num_bytes(self) -> int:
        return self.cache.payload_bytes(len(self.ids), self.span)

    def places(self, arena: "Arena") -> list[memoryview]:
        """Two places in an arena."""
        return [arena.view(start, self.num_bytes) for start in (0, self.num_bytes)]

    def read_gb_s(self, out: bytearray | memoryview) -> float:
        read = partial(self.cache.read_blocks, self.ids, self.span, out)
        return _gb_s(self.num_bytes, _best_s(self.cache.tensor.device, read))

    def require_right_copies(self, out: memoryview) -> None:
        """Blocks that the device has yet to write go to the host; then into blocks that it has yet to clear."""
        cache, device = self.cache, self.cache.tensor.device
        ids, slow = torch.tensor(self.ids, device=device), torch.ones(_SLOW[device.type], device=device)
        layers = self.span.layers
        kv = torch.randn(layers.count, 2, len(self.ids), *cache.tensor.shape[3:], device=device).to(cache.tensor.dtype)
        _wait_for(device)
        slow @ slow
        for layer in range(layers.first, layers.end):
            cache.layer(layer).index_copy_(1, ids, kv[layer - layers.first])
        cache.note_written(layers)
        cache.read_blocks(self.ids, self.span, out)
        if bytes(out) != kv.view(torch.uint8).cpu().numpy().tobytes():
            raise AssertionError("blocks were read before they were written")
        slow @ slow
        others = [block + 1 for block in self.ids]
        cache.clear_blocks(others)
        cache.write_blocks(others, self.span, out)
        if not torch.equal(cache.tensor[layers.first : layers.end, :, others], kv):
            raise AssertionError("blocks were written before they were cleared")


def _chunk(device: torch.device) -> _Chunk:
    num_layers, num_ids = (32, 64) if device.type == "cuda" else (2, 4)
    layout = KVLayout("m", num_layers, 8, 128, 16, "bfloat16")
    ids = list(range(0, 4 * num_ids, 4))
    random.Random(0).shuffle(ids)
    return _Chunk(KVCache(layout, 4 * num_ids, device), ids, KVSpan(Span(0, 2), layout.whole.heads))


@dataclass
class _Copied:
    gb_s: float = 0.0


@contextmanager
def _copying(chunk: _Chunk, places: list[memoryview]) -> Iterator[_Copied]:
    """A thread for each place copies into it again and again. At the end: how much that was, per second."""
    stop, begun_s, copied = threading.Event(), time.perf_counter(), _Copied()

    def copy(place: memoryview) -> int:
        num_bytes = 0
        while not stop.is_set():
            chunk.cache.read_blocks(chunk.ids, chunk.span, place)
            num_bytes += len(place)
        return num_bytes

    with ThreadPoolExecutor(len(places)) as threads:
        copying = [threads.submit(copy, place) for place in places]
        try:
            yield copied
        finally:
            stop.set()
    copied.gb_s = _gb_s(sum(each.result() for each in copying), time.perf_counter() - begun_s)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_gb_s(device: torch.device) -> float:
    source = torch.ones(2**28 if device.type == "cuda" else 2**22, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    return _gb_s(2 * 4 * len(source), _best_s(device, lambda: target.copy_(source)))


def _bf16_tflops(device: torch.device) -> float:
    size = 8192 if device.type == "cuda" else 128
    left = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    return round(2 * size**3 / _best_s(device, lambda: left @ left) / 1e12, 1)


def _best_s(device: torch.device, run: Callable[[], object]) -> float:
    """The shortest time of several runs, each until the device has finished. The first compiles and is not counted."""
    times_s = []
    for _ in range(_REPEATS if device.type == "cuda" else 2):
        begun_s = time.perf_counter()
        run()
        _wait_for(device)
        times_s.append(time.perf_counter() - begun_s)
    return min(times_s[1:])


def _gb_s(num_bytes: int, seconds: float) -> float:
    return round(num_bytes / seconds / 1e9, 1)


def _until(seconds: float, items: Iterable[Item]) -> Iterator[Item]:
    """The items, at least one, until the time has passed."""
    end_s = time.monotonic() + seconds
    for item in items:
        yield item
        if time.monotonic() > end_s:
            return


_IN_ORDER = (facts, attention, parity, mesh, copies, steps, copies_beside_steps, attention_times)
STAGES: dict[str, Callable[[torch.device, float], Figures]] = {stage.__name__: stage for stage in _IN_ORDER}


def main() -> None:
    name, device, seconds, out = sys.argv[1:]
    torch.set_float32_matmul_precision("highest")  # what is compared to: containers of NVIDIA allow TF32
    Path(out).write_text(json.dumps(STAGES[name](torch.device(device), float(seconds))))


if __name__ == "__main__":
    run_program(main)
