"""Drawn combinations of options: each answer is that of its request alone, to the bit in the compiled decoder.

A seed draws a model with its arithmetic and KV, requests of many kinds, and ways to serve them: slots, tokens of a
step, blocks (few: sequences are preempted and replayed), prefix cache, disk, drafts, and strangers that are aborted.
All blocks have held something else before: a read of what was not written shows in the answer.
Each request is first served alone, in whole prompts, without any of it.

    TANDEM_COMBINATIONS=500 python -m pytest -m soak tests/component/test_combinations.py
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import pytest
import torch

from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.kv.cache import KVCache
from engine.kv.disk import BlockFiles, DiskCache
from engine.loading.load_runner import load_model_runner, load_result_norm
from engine.model_runner import ModelRunner
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import SchedulerConfig
from engine.speculation.drafters import Drafter, NgramDrafter
from engine.speculation.mtp import MtpDrafter
from mesh.domain.errors import MeshError, WorkerBusy
from mesh.domain.kv import KVLayout
from mesh.domain.request import Fork, SequenceSpec
from mesh.domain.tokens import PromptLogprob, SampledToken
from tests.component.arms import load_arm, settings
from tests.fakes.drafters import FakeDrafter, eager_speculator, known
from tests.fakes.requests import make_request

NUM_SEEDS = int(os.environ.get("TANDEM_COMBINATIONS", "60"))
NUM_REQUESTS = 6
NUM_WAYS = 5
NUM_BLOCKS = 320
MAX_MODEL_LEN = 120
FAMILIES = (
    *("llama", "llama-multi-query", "mistral", "qwen2-window", "qwen3", "gpt2", "phi3", "gemma2", "gemma3", "bloom"),
    *("mixtral", "gpt-oss", "deepseek-v3-mtp", "llama4", "gemma4", "gemma4-moe"),
    *("lfm2", "bamba", "falcon-h1", "qwen3.5-mtp", "jamba"),
)
ARITHMETIC: tuple[dict[str, str], ...] = (
    *({}, {"kv_dtype": "float16"}, {"kv_dtype": "int8"}, {"dtype": "bfloat16"}),
    *({"quantize": "int8"}, {"quantize": "int4"}, {"quantize": "int8", "kv_dtype": "float16"}),
)
_RARE = 0.2


@dataclass
class Answers:
    """What came of requests, by their ids."""

    tokens: dict[str, list[SampledToken]] = field(default_factory=dict)
    prompts: dict[str, tuple[PromptLogprob, ...]] = field(default_factory=dict)

    def of(self, request_id: str) -> tuple[list[SampledToken], tuple[PromptLogprob, ...]]:
        return self.tokens[request_id], self.prompts.get(request_id, ())


@dataclass(frozen=True)
class Way:
    """How requests are served. `spare`: blocks beyond those of the longest sequence."""

    max_num_seqs: int = 1
    max_batch_tokens: int = 512
    spare: int = NUM_BLOCKS
    prefix_caching: bool = False
    has_disk: bool = False
    drafts: str = "none"  # "known": the truth, with mistakes; "own": by a layer for it if there is one, or n-grams
    mistakes: float = 0.0
    num_strangers: int = 0


def draw_way(random: Random) -> Way:
    slots, caches = random.choice((1, 2, 4, 8)), random.random() < 0.8
    return Way(
        max_num_seqs=slots,
        max_batch_tokens=max(slots, random.choice((1, 3, 7, 16, 33, 300))),
        spare=random.choice((0, 1, 4, 12, NUM_BLOCKS)),
        prefix_caching=caches,
        has_disk=caches and random.random() < 0.4,
        drafts=random.choice(("none", "own", "known", "known")),
        mistakes=random.choice((0.0, 0.2, 0.6)),
        num_strangers=random.choice((0, 0, 2)),
    )


def draw_request(random: Random, name: str, beginnings: list[list[int]]) -> SequenceSpec:
    """Lengths are those around the ends of blocks, one token, all that fits, and any."""
    num_new = random.choice((1, 2, 5, 20, 40))
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, MAX_MODEL_LEN, random.randrange(1, 80))
    length = min(random.choice(lengths), MAX_MODEL_LEN - num_new)
    begin = random.choice(beginnings) if random.random() < 0.6 else [random.randrange(256) for _ in range(length)]
    prompt = [*begin[: length - 1], random.choice((begin[length - 1], random.randrange(256)))]
    spec = make_request(
        name,
        prompt,
        max_new_tokens=num_new,
        sampling=draw_sampling(random, num_new),
        top_logprobs=random.choice((0, 0, 1, 5)),
        prompt_logprobs=random.random() < _RARE,
    )
    forks = tuple(Fork(f"{name}-{i}", 0, random.randrange(2**31)) for i in range(random.choice((0, 0, 0, 1, 2))))
    return replace(spec, sampling=replace(spec.sampling, seed=random.randrange(2**31)), forks=forks)


def draw_sampling(random: Random, num_new: int) -> dict[str, object]:
    """Each option with a chance of its own."""
    options: dict[str, tuple[object, ...]] = {
        "repetition_penalty": (1.2, 0.7, 3.0),
        "presence_penalty": (1.0, -1.0),
        "frequency_penalty": (0.5, -0.4),
        "logit_bias": ({65: 5.0, 66: -100.0}, {97: 100.0}),
        "min_new_tokens": (1, num_new),
        "stop_token_ids": ((10,), tuple(range(0, 256, 7))),
        "bad_word_ids": (((97,),), ((97, 98), (1, 2, 3))),
    }
    if random.random() < 0.5:
        options |= {"top_k": (1, 3, 50), "top_p": (0.01, 0.5, 0.95), "min_p": (0.02, 0.3), "typical_p": (0.2, 0.9)}
    drawn = {name: random.choice(values) for name, values in options.items() if random.random() < _RARE}
    return drawn | ({"temperature": random.choice((0.3, 1.0, 3.0))} if "top_k" in options else {})


class Served:
    """One engine, which serves requests in some way until all have ended."""

    def __init__(
        self,
        runner: ModelRunner,
        way: Way,
        random: Random,
        truth: Answers,
        folder: Path,
        mtp_runner: ModelRunner | None = None,
    ) -> None:
        layout, self._random = runner.kv_cache.layout, random
        num_blocks = layout.groups.num_blocks_at_once(MAX_MODEL_LEN, way.max_batch_tokens) + layout.state_blocks
        num_blocks = min(NUM_BLOCKS, num_blocks + layout.num_unused + layout.groups.count + way.spare)
        files = BlockFiles(folder, repr(layout), layout.block_bytes, 1 << 22) if way.has_disk else None
        self.disk = None if files is None else DiskCache(files, runner.kv_cache)
        config = SchedulerConfig(
            layout.block_size,
            way.max_batch_tokens,
            way.max_num_seqs,
            MAX_MODEL_LEN,
            prefix_caching=way.prefix_caching,
            state_blocks=layout.state_blocks,
            windows=layout.windows,
            windows_are_chunks=layout.windows_are_chunks,
        )
        pool = BlockPool(num_blocks) if self.disk is None else BlockPool(num_blocks, self.disk.evicted)
        self.scheduler = Scheduler(config, pool, self.disk)
        drafter = self._drafter(way, truth, layout, mtp_runner)
        speculator = None if drafter is None else eager_speculator(drafter, 4)
        self._engine = Engine(self.scheduler, runner, speculator=speculator)
        self._strangers: list[SequenceState] = []
        self.answers = Answers()
        self.num_replays = 0

    def _drafter(self, way: Way, truth: Answers, layout: KVLayout, mtp_runner: ModelRunner | None) -> Drafter | None:
        if way.drafts == "known":
            ids = {name: [token.id for token in tokens] for name, tokens in truth.tokens.items()}
            return FakeDrafter(known(ids | {f"stranger-{name}": each for name, each in ids.items()}), way.mistakes)
        if way.drafts == "own" and mtp_runner is not None:
            return MtpDrafter(mtp_runner, layout, max_model_len=MAX_MODEL_LEN, max_batch_tokens=way.max_batch_tokens)
        return NgramDrafter() if way.drafts == "own" else None

    def serve(self, specs: list[SequenceSpec], strangers: list[SequenceSpec]) -> None:
        """Requests come while others run; strangers are aborted at any time."""
        todo = [*specs, *strangers]
        self._random.shuffle(todo)
        while todo or self.scheduler.has_work:
            while todo and (not self.scheduler.has_work or self._random.random() < 0.5):
                spec = todo.pop()
                self._add(spec, is_stranger=spec in strangers)
            self._step()
            if self._strangers and self._random.random() < 0.2:
                self._engine.abort(self._strangers.pop())
        self.scheduler.check_integrity()
        if self.disk is not None:
            self.disk.close()

    def _add(self, spec: SequenceSpec, *, is_stranger: bool = False) -> None:
        sequence = SequenceState(spec)
        sequence.forks = [SequenceState(fork) for fork in spec.forked()]
        for preparing in self._engine.prepare([sequence, *sequence.forks]):
            preparing.result()
        if self.disk is not None:
            sequence.from_disk = self.disk.fetch(self.scheduler.tables.missing(sequence)).result()
        self.scheduler.add(sequence)
        self._strangers += [sequence, *sequence.forks] if is_stranger else []

    def _step(self) -> None:
        result = self._engine.step()
        for output in result.outputs:
            self.answers.tokens.setdefault(output.request_id, []).extend(output.tokens)
            if output.prompt_logprobs:
                self.answers.prompts[output.request_id] = output.prompt_logprobs
        lost = [*result.preempted, *(self._without_room(*failed) for failed in result.failed)]
        for sequence in lost:
            if sequence not in self._strangers:
                self._replay(sequence)

    def _without_room(self, sequence: SequenceState, error: MeshError) -> SequenceState:
        """A fork for which there was no room; any other failure is one of the test."""
        if not isinstance(error, WorkerBusy):
            raise error
        return sequence

    def _replay(self, lost: SequenceState) -> None:
        """As the router does: with the tokens so far; forks that have not started go alone."""
        spec, request_id = lost.spec, lost.spec.request_id
        done = tuple(token.id for token in self.answers.tokens.get(request_id, ()))
        needs_prompt = spec.prompt_logprobs and request_id not in self.answers.prompts
        again = replace(spec, attempt=spec.attempt + 1, token_ids=(*spec.token_ids[: spec.num_prompt_tokens], *done))
        self.num_replays += 1
        self._add(replace(again, forks=(), prompt_logprobs=needs_prompt))
        for fork in lost.forks:
            self._add(fork.spec)


def serve_alone(runner: ModelRunner, specs: list[SequenceSpec], folder: Path) -> Answers:
    answers = Answers()
    for spec in (one for each in specs for one in (replace(each, forks=()), *each.forked())):
        served = Served(runner, Way(), Random(0), answers, folder)
        served.serve([spec], [])
        answers.tokens |= served.answers.tokens
        answers.prompts |= served.answers.prompts
    return answers


def soil(cache: KVCache, random: Random) -> None:
    """Fill blocks with numbers of either sign, where blocks are cleared before their first use with NaN, too."""
    byte = random.choice((0x44, 0xC4, *([0xFF] if cache.clears_new else [])))
    cache.tensor.view(torch.uint8)[:, :, cache.layout.num_unused :] = byte


def stranger(spec: SequenceSpec) -> SequenceSpec:
    forks = tuple(replace(fork, request_id=f"stranger-{fork.request_id}") for fork in spec.forks)
    return replace(spec, request_id=f"stranger-{spec.request_id}", forks=forks)


def check(seed: int, checkpoint: Callable[[str], Path], folder: Path) -> int:
    """The number of replays."""
    random = Random(seed)
    family, arithmetic = FAMILIES[seed % len(FAMILIES)], random.choice(ARITHMETIC)
    block_size = 16 if family == "llama4" else random.choice((16, 16, 32, 48))  # it must divide chunks
    runner = load_arm(checkpoint(family), "compiled", num_blocks=NUM_BLOCKS, block_size=block_size, **arithmetic)
    mtp_runner = None
    if family.endswith("-mtp"):
        of_layer = settings(checkpoint(family), num_blocks=NUM_BLOCKS, block_size=block_size, is_mtp=True, **arithmetic)
        mtp_runner = load_model_runner(of_layer, large=runner.model)
        runner.result_norm = load_result_norm(replace(of_layer, is_mtp=False))
    beginnings = [[random.randrange(256) for _ in range(MAX_MODEL_LEN)], list(b"abc abc abd " * 10)]
    specs = [draw_request(random, str(i), beginnings) for i in range(NUM_REQUESTS)]
    alone = serve_alone(runner, specs, folder)
    num_replays, bytes_drawn = 0, Random(seed)
    for _ in range(NUM_WAYS):
        way = draw_way(random)
        soil(runner.kv_cache, bytes_drawn)
        if mtp_runner is not None:
            soil(mtp_runner.kv_cache, bytes_drawn)
        served = Served(runner, way, random, alone, folder, mtp_runner)
        served.serve(specs, [stranger(spec) for spec in specs[: way.num_strangers]])
        for request_id in alone.tokens:
            found = served.answers.of(request_id)
            assert found == alone.of(request_id), f"{seed=} {family} {arithmetic} {block_size=} {way} {request_id=}"
        assert served.scheduler.pool.num_free == served.scheduler.pool.num_blocks - runner.kv_cache.layout.num_unused
        num_replays += served.num_replays
    return num_replays


def test_combinations_change_no_answer(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """A few, of models that have different kinds of KV: of all layers, latent, of two sizes in int8, beside a state."""
    assert sum(check(seed, checkpoint, tmp_path) for seed in (0, 12, 35, 19)), "nothing was preempted"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(NUM_SEEDS))
def test_many_combinations(checkpoint: Callable[[str], Path], tmp_path: Path, seed: int) -> None:
    check(seed, checkpoint, tmp_path)
