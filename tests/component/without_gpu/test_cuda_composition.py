"""Steps of every family on a GPU that is not there: what they read from it, bring to it, and hold in its memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.backend import AttentionShape, attention_shape
from engine.attention.torch_sdpa import TorchAttention
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.kv.cache import KVCache
from engine.loading.activation_memory import activation_bytes
from engine.loading.resolve import kv_layout
from engine.loading.runner_parts import assemble_runner, dummy_weights
from engine.loading.weights import WeightsTarget
from engine.model import DecoderMemory
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.encoder_decoder.model import EncoderDecoder
from engine.models.encoder_decoder.parameters import encoder_decoder_specs
from engine.models.encoder_decoder.step import SequenceTokens
from engine.models.expert_products import FEW_ROWS
from engine.models.layer import Layer, run_layer
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_config, load_decoder_config
from engine.sequence import SequenceState
from tests.component.arms import settings
from tests.component.checkpoints import FAMILIES, OTHER_FAMILIES
from tests.component.encoder_decoders import FORMS, build_encoder_decoder
from tests.fakes.device import DEVICE, FakeCopies, HostReads, MixesDevices, PeakBytes, no_waiting
from tests.fakes.launches import Launches
from tests.fakes.requests import make_request

BLOCK_SIZE = 4
EXPERTS = ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek")


def batch() -> ScheduledBatch:
    """Two sequences that decode, the rest of a prompt, and a whole one."""
    items = []
    for number, (num_tokens, start) in enumerate([(6, 5), (9, 8), (9, 4), (7, 0)]):
        sequence = SequenceState(make_request(f"r{number}", range(num_tokens), sampling={"temperature": 1.0}))
        sequence.block_table += [
            *range(4 * number, 4 * number + 4)
        ] * 15  # as long for three, four or five groups of layers
        items.append(ScheduledSequence(sequence, start, num_tokens - start))
    return ScheduledBatch(tuple(items))


def load(model_dir: Path, dtype: str, attention: str = "torch") -> ModelRunner:
    """With torch's attention, whatever it calls itself."""
    wanted = settings(model_dir, dtype=dtype, kv_dtype=dtype, block_size=BLOCK_SIZE)
    config = load_decoder_config(model_dir)
    cache = KVCache(kv_layout(config, wanted), 16, DEVICE)
    parameters = dummy_weights(parameter_specs(config), WeightsTarget(DEVICE, getattr(torch, dtype)))
    shape = attention_shape(config)
    backend = TorchAttention(shape)
    backend.name = attention
    return assemble_runner(wanted, Decoder(config, parameters, DecoderMemory(cache, {shape: backend})), cache)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Those of the kernels of experts, which run where attention is called triton."""
    found = Launches()
    monkeypatch.setattr("engine.models.expert_products.why_not_triton", lambda device: None)
    monkeypatch.setattr("engine.models.expert_products.import_module", lambda name: found)
    return found


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, "bfloat16") for family in (*FAMILIES, *OTHER_FAMILIES)),  # in which steps convert numbers, too
        *((family, "float32") for family in ("llama", "gemma2", "bloom", "mixtral", "gpt-oss", "deepseek-v3")),
    ],
)
def test_a_step_reads_from_the_gpu_once(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """And mixtures of experts once more in each of their layers, without the kernels: how many rows each expert has."""
    copies, reads = FakeCopies(), HostReads()
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: copies)
    experts = load_decoder_config(checkpoint(family)).experts
    runner = load(checkpoint(family), dtype)
    with reads:
        runner.begin(batch())()  # the first step makes constants
    copies.num_sent = reads.count = 0
    copies.read.clear()
    with no_waiting(), reads:
        outputs = runner.begin(batch())()
    assert [len(output.tokens) for output in outputs] == [1] * 4
    assert copies.num_sent == 2, "the step's arrays, and the parameters of sampling"
    total, tokens, logprobs = ((), (4,), (4,))
    assert copies.read == [[total, tokens, logprobs]]
    assert reads.count == (0 if experts is None else sum(experts.layers))


@pytest.mark.parametrize("family", EXPERTS)
def test_kernels_of_experts_read_nothing_back(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, launches: Launches, family: str
) -> None:
    """And get tensors of the GPU and numbers of the host only."""
    copies, reads, experts = FakeCopies(), HostReads(), load_decoder_config(checkpoint(family)).experts
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: copies)
    runner = load(checkpoint(family), "bfloat16", "triton")
    runner.begin(batch())()
    launches.noted.clear()
    with no_waiting(), reads:
        runner.begin(batch())()
    assert reads.count == 0
    assert experts is not None
    assert len(launches.noted) == 3 * sum(experts.layers)
    for _, arguments, constants in launches.noted:
        assert {value.device for value in arguments if isinstance(value, torch.Tensor)} == {DEVICE}
        assert all(isinstance(value, int | torch.Tensor) for value in (*arguments, *constants.values()))


@pytest.mark.parametrize("family", EXPERTS)
def test_long_steps_of_experts_are_left_to_the_host(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, launches: Launches, family: str
) -> None:
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: FakeCopies())
    runner, counts = load(checkpoint(family), "bfloat16", "triton"), []
    sequence = SequenceState(make_request("long", range(FEW_ROWS + 2)))
    sequence.block_table += range(FEW_ROWS // BLOCK_SIZE + 1)
    for num_tokens in (FEW_ROWS, FEW_ROWS + 1):
        launches.noted.clear()
        with HostReads() as reads:
            runner.begin(ScheduledBatch((ScheduledSequence(sequence, 0, num_tokens),)))()
        counts.append((len(launches.noted), reads.count))
    experts = load_decoder_config(checkpoint(family)).experts
    assert experts is not None
    (short_launches, short_reads), long = counts
    assert short_launches == 3 * sum(experts.layers)
    assert long == (0, short_reads + sum(experts.layers))


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reads a value": lambda x: x * x.sum().item(),
    "reads a list": lambda x: x * x.sum(1).tolist()[0],
    "has a shape by values": lambda x: x[(x > 0).any(1).nonzero()[:, 0]],
    "sends a number": lambda x: x * torch.tensor(2.0, device=DEVICE),
    "sends an array": lambda x: x + torch.ones(x.shape[-1], dtype=x.dtype).to(DEVICE),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_step_that_waits_would_be_found_out(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    """In each of its layers, and not to be seen in what it computes."""
    reads = HostReads()
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: FakeCopies())
    monkeypatch.setattr("engine.models.decoder.run_layer", lambda *about: WRONG[mistake](run_layer(*about)))
    runner, found = load(checkpoint("llama"), "float32"), False
    try:
        with no_waiting(), reads:
            runner.begin(batch())()
    except MixesDevices:
        found = True
    assert found or reads.count


@pytest.mark.parametrize("wasted", [40, 4000])
def test_memory_that_is_not_counted_would_be_found_out(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, wasted: int
) -> None:
    """So many rows of a layer that live until its end."""
    used, step = PeakBytes(), prompts()

    def wasteful(layer: Layer, heads: AttentionShape, residual: torch.Tensor, *about: Any) -> torch.Tensor:
        kept = residual.new_empty(wasted * residual.shape[0], residual.shape[1])
        result = run_layer(layer, heads, residual, *about)
        return result.add_(kept[0])

    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: FakeCopies())
    monkeypatch.setattr("engine.models.decoder.run_layer", wasteful)
    runner, config = load(checkpoint("llama"), "bfloat16"), load_decoder_config(checkpoint("llama"))
    with HostReads(), used:
        runner.begin(step)()
    counted = activation_bytes(config, torch.bfloat16.itemsize, num_tokens=step.num_tokens, num_sampled=0)
    assert used.peak > counted


def prompts() -> ScheduledBatch:
    """The first parts of two prompts: nothing is sampled."""
    items = []
    for number in range(2):
        sequence = SequenceState(make_request(f"r{number}", range(32)))
        sequence.block_table += [*range(8 * number, 8 * number + 8)] * 6  # recurrent states, too
        items.append(ScheduledSequence(sequence, 0, 30))
    return ScheduledBatch(tuple(items))


@pytest.mark.parametrize(("steps", "num_sampled"), [(batch, 4), (prompts, 0)])
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "bloom", "gpt2", "falcon-7b", "mixtral", "qwen2-moe", "mamba", "jamba"]
)
def test_a_step_holds_as_much_memory_as_is_counted(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    steps: Callable[[], ScheduledBatch],
    num_sampled: int,
) -> None:
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: FakeCopies())
    runner = load(checkpoint(family), "bfloat16")
    config, used, step = load_decoder_config(checkpoint(family)), PeakBytes(), steps()
    with HostReads():
        runner.begin(step)()
        with used:
            runner.begin(step)()
    counted = activation_bytes(config, torch.bfloat16.itemsize, num_tokens=step.num_tokens, num_sampled=num_sampled)
    assert counted / 4 <= used.peak <= counted


@pytest.mark.parametrize("steps", [batch, prompts])
@pytest.mark.parametrize("family", EXPERTS)
def test_kernels_of_experts_hold_as_much_memory_as_is_counted(
    checkpoint: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    launches: Launches,
    family: str,
    steps: Callable[[], ScheduledBatch],
) -> None:
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: FakeCopies())
    runner = load(checkpoint(family), "bfloat16", "triton")
    config, used, step = load_decoder_config(checkpoint(family)), PeakBytes(), steps()
    with HostReads():
        runner.begin(step)()
        launches.noted.clear()
        with used:
            runner.begin(step)()
    assert launches.noted
    counted = activation_bytes(
        config,
        torch.bfloat16.itemsize,
        num_tokens=step.num_tokens,
        num_sampled=4 if steps is batch else 0,
        experts_on_device=True,
    )
    assert counted / 4 <= used.peak <= counted


@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_an_encoder_decoder_stays_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """It reads the lengths of its sequences, which this GPU does not have."""
    model_dir, copies = build_encoder_decoder(form, tmp_path), FakeCopies()
    config = load_config(model_dir)
    assert isinstance(config, EncoderDecoderConfig)
    wanted = settings(model_dir, dtype="bfloat16", kv_dtype="bfloat16", block_size=BLOCK_SIZE)
    cache = KVCache(kv_layout(config, wanted), 16, DEVICE)
    target = WeightsTarget(DEVICE, torch.bfloat16)
    parameters = dummy_weights(encoder_decoder_specs(config, own_lm_head=False), target)
    shape = AttentionShape(config.num_heads, config.num_heads, config.head_dim, given_scale=1.0)
    memory = DecoderMemory(cache, {shape: TorchAttention(shape)})
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: copies)
    lengths = [SequenceTokens(0, 0, 1, 0, 5, 8), SequenceTokens(1, 1, 8, 6, 6, 7)]
    monkeypatch.setattr("engine.models.encoder_decoder.step._sequences", lambda metadata: lengths)
    items = []
    for number, (num_tokens, start) in enumerate([(8, 7), (7, 0)]):
        sequence = SequenceState(make_request(f"r{number}", range(num_tokens)))
        sequence.block_table += range(4 * number, 4 * number + 4)
        items.append(ScheduledSequence(sequence, start, num_tokens - start))
    outputs = assemble_runner(wanted, EncoderDecoder(config, parameters, memory), cache).begin(
        ScheduledBatch(tuple(items))
    )()
    assert [len(output.tokens) for output in outputs] == [1, 1]
    assert copies.read == [[(), (2,), (2,)]]
