"""Decode steps that are captured and replayed, by a stand-in for CUDA graphs, against steps that are not."""

import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.triton_paged import TritonAttention
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.decode_graphs import DecodeGraphs
from engine.kv.cache import KVCache
from engine.loading.graphs import capture_graphs
from engine.loading.load_runner import draft_bytes, load_speculator
from engine.loading.resolve import kv_layout, resolve
from engine.loading.runner_parts import assemble_runner, decoder_memory, load_parameters
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.model_config import ModelConfig
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.runner import RunnerOutput
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from engine.settings import NO_GRAPHS, NO_SPECULATION, GraphSettings, Speculation
from engine.speculation.drafters import DraftModel
from mesh.domain.kv import Span
from tests.component.arms import settings
from tests.component.checkpoints import VOCAB_SIZE, families_by_layers
from tests.component.sampling.test_speculation import answer, requests
from tests.component.test_load import edit_weights
from tests.fakes.requests import make_request
from tests.fakes.tape import NotCapturable, TapeCapture, TapedKernels

SIZES = (1, 2, 4, 8)
MAX_TOKENS = 40
GRAPHS = GraphSettings(SIZES, MAX_TOKENS)
MAX_SEQS = 10  # more than the largest captured step
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2},
    {"logit_bias": {5: 3.0}, "min_new_tokens": 4},
]


def load(model_dir: Path, capture: TapeCapture | None, graphs: GraphSettings = GRAPHS, **asked: str) -> ModelRunner:
    """A runner of the eager decoder on CPU, with captured steps if `capture` is given. `asked`: more settings."""
    wanted = settings(model_dir, block_size=4, num_blocks=200, **{"attention": "torch", "enforce_eager": True} | asked)
    wanted, config = resolve(replace(wanted, graphs=graphs))
    assert isinstance(config, ModelConfig)
    device = torch.device("cpu")
    cache = KVCache(kv_layout(config, wanted), 200, device, num_spare=1)
    parameters = load_parameters(wanted, config, parameter_specs(config))
    memory = decoder_memory(wanted, config, cache)
    if isinstance(memory.attention, TritonAttention):
        memory.attention._kernels = TapedKernels(memory.attention._kernels)
    model = Decoder(config, parameters, memory)
    if model._expert_products is not None:
        model._expert_products._kernels = TapedKernels(model._expert_products._kernels)
    captured: DecodeGraphs | None = None if capture is None else capture_graphs(wanted, model, cache, capture)
    return assemble_runner(wanted, model, cache, graphs=captured)


class Traffic:
    """Random steps over sequences that come and go. Two runners get the same steps; blocks are scattered and reused.
    A sequence has `num_drafts` drafts with a chance of `drafted`. Layers are in so many groups.
    """

    def __init__(self, seed: int, drafted: float = 0.03, num_drafts: int = 3, num_groups: int = 1) -> None:
        self._num_groups = num_groups
        self._drafted = drafted
        self._num_drafts = num_drafts
        self._rng = random.Random(seed)
        self._free = list(range(200))
        self._rng.shuffle(self._free)
        self.sequences: list[SequenceState] = []
        self._number = 0

    def next_batch(self) -> ScheduledBatch:
        if len(self.sequences) < 2 or (len(self.sequences) < MAX_SEQS and self._rng.random() < 0.15):
            self.sequences.append(self._new())
        chosen = self._rng.sample(self.sequences, self._rng.randint(1, len(self.sequences)))
        items = sorted((self._item(sequence) for sequence in chosen), key=lambda item: item.num_tokens > 1)
        for item in items:
            while len(item.sequence.block_table) * 4 < item.end * self._num_groups:
                item.sequence.block_table += [self._free.pop() for _ in range(self._num_groups)]
        return ScheduledBatch(tuple(items))

    def _new(self) -> SequenceState:
        self._number += 1
        prompt = [self._rng.randrange(VOCAB_SIZE) for _ in range(self._rng.randint(1, 12))]
        sampling = self._rng.choice(KINDS)
        request = make_request(f"r{self._number}", prompt, max_new_tokens=MAX_TOKENS - len(prompt), sampling=sampling)
        return SequenceState(request)

    def _item(self, sequence: SequenceState) -> ScheduledSequence:
        start = sequence.num_computed_tokens
        if sequence.num_uncomputed_tokens > 1:
            return ScheduledSequence(sequence, start, self._rng.randint(1, sequence.num_uncomputed_tokens))
        space = sequence.spec.max_total_tokens - sequence.num_tokens
        drafts = tuple(self._rng.randrange(VOCAB_SIZE) for _ in range(min(self._num_drafts, space - 1)))
        if self._rng.random() > self._drafted:
            drafts = ()
        return ScheduledSequence(sequence, start, 1 + len(drafts), drafts)

    def update(self, batch: ScheduledBatch, outputs: list[RunnerOutput], *runners: ModelRunner) -> None:
        for item, output in zip(batch.items, outputs, strict=True):
            sequence = item.sequence
            sequence.token_ids += [token.id for token in output.tokens]
            sequence.num_computed_tokens = min(item.end, sequence.num_tokens - 1)
            if sequence.num_tokens >= sequence.spec.max_total_tokens or self._rng.random() < 0.01:
                self.sequences.remove(sequence)
                self._free += sequence.block_table
                self._rng.shuffle(self._free)
                for runner in runners:
                    runner.forget(sequence)


@pytest.mark.parametrize(
    "num_steps",
    [
        pytest.param(250, marks=pytest.mark.timeout(600)),
        pytest.param(5_000, marks=[pytest.mark.soak, pytest.mark.timeout(6_000)]),
    ],
)
def test_random_steps_are_the_same_with_and_without_graphs(checkpoint: Callable[[str], Path], num_steps: int) -> None:
    capture = TapeCapture()
    plain, graphed = load(checkpoint("llama"), None), load(checkpoint("llama"), capture)
    require_same_steps(plain, graphed, Traffic(seed=1), num_steps)
    require_same_kv(plain.kv_cache.tensor, graphed.kv_cache.tensor)
    assert capture.num_replays > num_steps / 2
    assert all(graph.num_replays for graph in capture.graphs), "every captured size was replayed"


def require_same_steps(plain: ModelRunner, graphed: ModelRunner, traffic: "Traffic", num_steps: int) -> None:
    """Both compute these steps alike."""
    num_tokens = num_others = 0
    for _ in range(num_steps):
        batch = traffic.next_batch()
        wanted, outputs = plain.begin(batch)(), graphed.begin(batch)()
        for one, other in zip(outputs, wanted, strict=True):
            assert one.failure is other.failure is None
            num_tokens += len(other.tokens)
            # Products of another number of rows may round differently, and so choose the other of two equals.
            num_others += [token.id for token in one.tokens] != [token.id for token in other.tokens]
            for ours, theirs in zip(one.tokens, other.tokens, strict=False):
                assert ours.id != theirs.id or ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        traffic.update(batch, wanted, plain, graphed)
    assert num_others <= num_tokens / 2000


def require_same_kv(plain: Tensor, graphed: Tensor) -> None:
    """Padding wrote to the spare block only, which is the last."""
    torch.testing.assert_close(graphed[:, :, :-1], plain[:, :, :-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", families_by_layers())
def test_every_family_can_be_captured_unless_the_host_selects_experts(
    checkpoint: Callable[[str], Path], family: str
) -> None:
    """Experts that kernels compute are captured in interpreted_experts.py."""
    model_dir, capture = checkpoint(family), TapeCapture()
    if load_decoder_config(model_dir).experts is not None:
        with pytest.raises(NotCapturable):  # so `why_not_captured` rules them out
            load(model_dir, capture)
        return
    require_same_until_replayed(load(model_dir, None), load(model_dir, capture), capture)


def test_steps_with_scaled_fp8_kv_can_be_captured(checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    model_dir, capture = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model")), TapeCapture()
    scales = {f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor(0.3) for layer in range(3) for kind in "kv"}
    edit_weights(model_dir, lambda tensors: tensors.update(scales))
    require_same_until_replayed(
        load(model_dir, None, kv_dtype="fp8"), load(model_dir, capture, kv_dtype="fp8"), capture
    )


def require_same_until_replayed(plain: ModelRunner, graphed: ModelRunner, capture: TapeCapture) -> None:
    traffic = Traffic(seed=2, num_groups=plain.kv_cache.layout.groups.count)
    while not capture.num_replays:
        batch = traffic.next_batch()
        wanted, outputs = plain.begin(batch)(), graphed.begin(batch)()
        for one, other in zip(outputs, wanted, strict=True):
            for ours, theirs in zip(one.tokens, other.tokens, strict=True):
                assert ours.id != theirs.id or ours.logprob == pytest.approx(theirs.logprob, abs=1e-3)
        traffic.update(batch, wanted, plain, graphed)


def test_steps_of_a_draft_model_are_replayed(checkpoint: Callable[[str], Path]) -> None:
    """All but those that catch up. It drafts what it drafts without graphs; how many, is a matter of time."""
    model_dir, capture, noted = checkpoint("llama-tied"), TapeCapture(), []
    for each in (None, capture):
        drafter = NotedDrafts(load(model_dir, each, GraphSettings((1, 2, 4, 8), 80)))
        answer(load(checkpoint("llama"), None), drafter, requests())
        noted.append(drafter.drafts)
    both = noted[0].keys() & noted[1].keys()
    pairs = [list(zip(noted[0][key], noted[1][key], strict=False)) for key in both]
    assert all(one == other for pair in pairs for one, other in pair)
    assert sum(map(len, pairs)) > 20
    assert capture.num_replays > 10


class NotedDrafts(DraftModel):
    """`drafts`: by what they follow."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner, runner.kv_cache.layout, max_model_len=512, max_batch_tokens=64)
        self.drafts: dict[tuple[object, ...], tuple[int, ...]] = {}

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[tuple[int, ...]]:
        drafts = super().draft(sequences, lengths)
        keys = ((sequence.key, *sequence.token_ids) for sequence in sequences)
        self.drafts.update({key: found for key, found in zip(keys, drafts, strict=True) if found})
        return drafts


def test_a_draft_model_beside_a_model_on_a_gpu(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is captured, too, and what it takes besides its KV is counted before the KV is sized."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    speculation = Speculation("draft", 4, checkpoint("llama-tied"))
    wanted = settings(checkpoint("llama"), device="cuda", graphs=GraphSettings(SIZES, 80, max_drafts=4))
    [draft] = _loaded_drafts(speculation, replace(wanted, num_blocks=64))
    assert draft.graphs == GraphSettings(SIZES, 80)
    assert draft_bytes(speculation, wanted) > draft_bytes(speculation, replace(wanted, graphs=NO_GRAPHS)) > 0
    assert draft_bytes(speculation, replace(wanted, device="cpu")) == 0
    assert draft_bytes(NO_SPECULATION, wanted) == 0


def _loaded_drafts(speculation: Speculation, model: RunnerSettings) -> list[RunnerSettings]:
    """The settings with which the draft model is loaded."""
    found: list[RunnerSettings] = []

    def load_draft(settings: RunnerSettings) -> ModelRunner:
        found.append(settings)
        return load(settings.model_dir, None)

    load_speculator(speculation, model, load(model.model_dir, None), load_draft, max_batch_tokens=64)
    return found


def test_a_capture_writes_to_the_spare_block_only(checkpoint: Callable[[str], Path]) -> None:
    cache = load(checkpoint("llama"), TapeCapture()).kv_cache
    assert not cache.tensor[:, :, : cache.num_blocks].any()
    assert cache.tensor[:, :, cache.num_blocks].any()


def test_steps_that_are_not_captured_run_without_graphs(checkpoint: Callable[[str], Path]) -> None:
    """Layers that are announced, more rows than captured, blocks of sequences that are too long."""
    capture = TapeCapture()
    runner = load(checkpoint("llama"), capture)

    def decoding(number: int, num_tokens: int) -> ScheduledSequence:
        sequence = SequenceState(make_request(f"r{number}", range(num_tokens), max_new_tokens=4))
        num_blocks = -(-num_tokens // 4)
        sequence.block_table += range(number * num_blocks, (number + 1) * num_blocks)
        return ScheduledSequence(sequence, num_tokens - 1, 1)

    def announced(batch: ScheduledBatch, layers: Span) -> None:
        counts.append(layers.count)

    counts: list[int] = []
    few = ScheduledBatch(tuple(decoding(number, 5) for number in range(3)))
    runner.begin(few, announced)()
    assert counts
    runner.begin(ScheduledBatch(tuple(decoding(number, 5) for number in range(9))))()
    runner.begin(ScheduledBatch((decoding(0, MAX_TOKENS + 8),)))()
    assert capture.num_replays == 0
    runner.begin(few)()
    assert capture.num_replays == 1
