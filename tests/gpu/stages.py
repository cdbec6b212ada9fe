"""The stages of `make test-gpu`. Each runs in a process of its own: python -m tests.gpu.stages NAME DEVICE SECONDS OUT

A stage works for about SECONDS, writes its figures to OUT as JSON, and fails by an exception. On CPU it does the same
with small shapes, and with Triton's interpreter, so that a mistake in it costs no time on a GPU.
"""

import asyncio
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import torch

Figures = dict[str, object]
Item = TypeVar("Item")
PARITY_FAMILIES = ("llama", "qwen2-window", "gemma2", "bloom", "mistral", "gpt2")
_PACKAGES = ("torch", "triton", "flash-attn", "transformers", "numba", "grpcio")
_REPEATS = 20


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

    torch.backends.cuda.matmul.allow_tf32 = False
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
    from engine.kv_cache import KVCache
    from mesh.domain.kv import KVLayout

    is_large = device.type == "cuda"
    layout = KVLayout("m", 32 if is_large else 2, 8, 128, 16, "bfloat16")
    cache, ids = KVCache(layout, 256, device), list(range(0, 128, 2))
    cache.tensor.view(torch.uint8).random_(0, 100)
    payload = bytearray(cache.payload_bytes(len(ids), layout.whole))
    to_host_s = _best_s(device, lambda: cache.read_blocks(ids, layout.whole, payload))
    before = bytes(payload)
    cache.tensor.zero_()
    to_device_s = _best_s(device, lambda: cache.write_blocks(ids, layout.whole, before))
    cache.read_blocks(ids, layout.whole, payload)
    if payload != before:
        raise AssertionError("blocks that were written are not those that were read")
    figures = {"to host, GB/s": _gb_s(len(before), to_host_s), "to device, GB/s": _gb_s(len(before), to_device_s)}
    if is_large:
        on_device = torch.empty(len(before), dtype=torch.uint8, device=device)
        pinned = torch.empty(len(before), dtype=torch.uint8, pin_memory=True)
        figures["one pinned copy to host, GB/s"] = _gb_s(len(before), _best_s(device, lambda: pinned.copy_(on_device)))
    return figures


def steps(device: torch.device, seconds: float) -> Figures:
    """Milliseconds of a prompt and of decode steps, without a mesh."""
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
            for batch in batches:
                figures[f"{model_dir.name}, step of {batch}, ms"] = round(measured.decode_ms(batch), 2)
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
        if device.type == "cuda":
            torch.cuda.synchronize(device)
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


STAGES: dict[str, Callable[[torch.device, float], Figures]] = {
    stage.__name__: stage for stage in (facts, attention, parity, mesh, copies, steps, attention_times)
}


def main() -> None:
    name, device, seconds, out = sys.argv[1:]
    Path(out).write_text(json.dumps(STAGES[name](torch.device(device), float(seconds))))


if __name__ == "__main__":
    main()
