"""A mesh whose parts are on machines of their own, its clients, and what they were answered."""

import asyncio
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tandem
from tests.chaos.cluster import Node
from tests.component.checkpoints import VOCAB_SIZE, save_tokenizer
from tests.e2e.mesh_process import pools_are_whole, wait_serving
from tests.netns.machines import Machine

ROLES = ("router", "prefill", "decode")
START_S = 400.0  # a first start compiles kernels
PORT, REGISTRY_PORT, WORKER_PORT = 50051, 50052, 50053
NUM_TOKENS = 400
ANSWER_S = 100.0
"""Longest that any answer may take, whatever the network does."""

_AHEAD = """
import runpy, sys, time
from functools import partial

ahead_s, module = float(sys.argv[1]), sys.argv[2]
time.time = partial(lambda now, ahead_s: now() + ahead_s, time.time, ahead_s)
sys.argv = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""
"""Runs a module whose time.time(), which signs heartbeats, is ahead; monotonic clocks are not touched."""

Request = Mapping[str, Any]


def wide_checkpoint(folder: Path) -> Path:
    """A random model that computes little and has much KV: 64 KiB a token."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    config = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, tie_word_embeddings=True, **sizes, **heads)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def requests(first: int = 0) -> list[Request]:
    """Four of them, greedy and seeded; another `first` gives others."""
    return [
        {
            "token_ids": [(7 * i + j + 1) % 256 for j in range(20 + 90 * (i - first))],
            "temperature": 0.8 if i % 2 else 0.0,
            "seed": i,
            "max_new_tokens": NUM_TOKENS,
            "ignore_eos": True,
        }
        for i in range(first, first + 4)
    ]


@dataclass(slots=True)
class Answer:
    """Tokens as they came, in seconds after the request, and the error that ended them, if one did."""

    token_ids: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        """The longest time without a token."""
        return max((b - a for a, b in zip([0.0, *self.at_s], self.at_s, strict=False)), default=0.0)


async def ask(client: tandem.AsyncClient, request: Request, has_begun: asyncio.Event | None = None) -> Answer:
    """One answer. `has_begun` is set at its 10th token."""
    answer, started_s = Answer(), time.monotonic()
    try:
        async for event in client.stream(**request):
            answer.token_ids.append(event.token.id)
            answer.at_s.append(time.monotonic() - started_s)
            if has_begun is not None and len(answer.token_ids) == 10:
                has_begun.set()
    except tandem.TandemError as error:
        answer.error = f"{type(error).__name__}: {error}"
    return answer


async def ask_all(client: tandem.AsyncClient, requests: Sequence[Request]) -> list[Answer]:
    return await asyncio.gather(*(ask(client, request) for request in requests))


@dataclass(frozen=True, slots=True)
class Latency:
    """Medians over prompts of 400 tokens, one after the other. The second token needs all of the prompt's KV."""

    first_token_ms: float
    second_token_ms: float

    def __str__(self) -> str:
        return f"TTFT {self.first_token_ms:.0f} ms, second token {self.second_token_ms:.0f} ms later"


async def measure_latency(client: tandem.AsyncClient, salt: int, count: int = 5) -> Latency:
    """Prompts of another `salt` share no KV."""
    answers = []
    for number in range(count):
        prompt = [(salt + 3 * number) % 256, *((salt + number + 5 * j) % 256 for j in range(399))]
        answers.append(await ask(client, {"token_ids": prompt, "max_new_tokens": 2, "ignore_eos": True}))
    assert not any(answer.error for answer in answers), answers
    firsts, seconds = zip(*(answer.at_s for answer in answers), strict=True)
    gaps = [second - first for first, second in zip(firsts, seconds, strict=True)]
    return Latency(1e3 * statistics.median(firsts), 1e3 * statistics.median(gaps))


@asynccontextmanager
async def mesh_on(
    places: Mapping[str, Machine],
    hosts: Mapping[str, str],
    model: Path,
    log_dir: Path,
    *,
    registry_url: str = "",
    decode_clock_s: float = 0.0,
    wait: bool = True,
) -> AsyncIterator[tandem.AsyncClient]:
    """Start router, prefill and decode worker at `places`, under `hosts`, the names or addresses by which they find
    each other, with logs in the folder `log_dir`. Yields a client, which never tries again by itself. The decode
    worker's wall clock is ahead by `decode_clock_s`.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    environ |= {"TANDEM_MESH_KEY": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    environ |= {"TANDEM_REGISTRY_URL": registry_url} if registry_url else {}
    nodes = []
    for role in ROLES:
        module, *flags = _command(role, hosts, has_redis=bool(registry_url))
        ahead_s = decode_clock_s if role == "decode" else 0.0
        program = ["-c", _AHEAD, str(ahead_s), module] if ahead_s else ["-m", module]
        command = [*places[role].prefix, sys.executable, *program, *flags, f"--model={model}", "--name=wide"]
        node = Node(role, [*command, "--follow-stdin"], environ, log_dir / f"{role}.log", None)
        nodes.append(node)
        node.start()
    try:
        # What the mesh does is measured, not what the client makes good.
        options = {"max_retries": 0, "resume_timeout": 0, "timeout": ANSWER_S}
        async with tandem.AsyncClient(f"127.0.0.1:{PORT}", **options) as client:
            if wait:
                await wait_whole(client, START_S)
            yield client
            if wait:
                await wait_whole(client)
    finally:
        await asyncio.gather(*(node.stop() for node in nodes))
    assert [end for node in nodes for end in node.exits if not end.wanted] == []


async def wait_whole(client: tandem.AsyncClient, within_s: float = ANSWER_S) -> None:
    """Return when both workers serve and are at rest."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                await wait_serving(client, "prefill")
                await wait_serving(client, "decode")
                break
            except tandem.TandemError:  # the router is about to listen
                await asyncio.sleep(0.2)
    await pools_are_whole(client)


def _command(role: str, hosts: Mapping[str, str], *, has_redis: bool) -> list[str]:
    if role == "router":
        own = [] if has_redis else [f"--registry-host={hosts[role]}", f"--registry-port={REGISTRY_PORT}"]
        return ["router", "--host=127.0.0.1", f"--port={PORT}", "--expect-prefill=1", "--expect-decode=1", *own]
    size = "--max-batch-total-tokens=6144" if role == "decode" else "--kv-cache-bytes=134217728"
    registry = f"[{hosts['router']}]" if ":" in hosts["router"] else hosts["router"]
    where = [] if has_redis else [f"--registry-address={registry}:{REGISTRY_PORT}"]
    port = WORKER_PORT + ROLES.index(role)
    cpu = ("--device=cpu", "--num-threads=1", size)
    return [f"{role}_worker", f"--worker-id={role}-0", f"--host={hosts[role]}", f"--port={port}", *cpu, *where]
