"""Steps of every family on a GPU that is not there read from it once, and bring it arrays twice."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.attention.backend import attention_shape
from engine.attention.torch_sdpa import TorchAttention
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.kv_cache import KVCache
from engine.load import assemble_runner
from engine.model import DecoderMemory
from engine.model_runner import ModelRunner
from engine.models.decoder import Decoder
from engine.models.parameters import parameter_specs
from engine.models.read_config import load_decoder_config
from engine.resolve import kv_layout
from engine.sequence import SequenceState
from engine.weights import WeightsTarget, dummy_weights
from tests.component.arms import settings
from tests.component.checkpoints import FAMILIES, OTHER_FAMILIES
from tests.fakes.device import DEVICE, FakeCopies, no_waiting
from tests.fakes.requests import make_request

BLOCK_SIZE = 4


def batch() -> ScheduledBatch:
    """Two sequences that decode, the rest of a prompt, and a whole one."""
    items = []
    for number, (num_tokens, start) in enumerate([(6, 5), (9, 8), (9, 4), (7, 0)]):
        sequence = SequenceState(make_request(f"r{number}", range(num_tokens), sampling={"temperature": 1.0}))
        sequence.block_table += range(4 * number, 4 * number + 4)
        items.append(ScheduledSequence(sequence, start, num_tokens - start))
    return ScheduledBatch(tuple(items))


def load(model_dir: Path, dtype: str) -> ModelRunner:
    wanted = settings(model_dir, dtype=dtype, kv_dtype=dtype, block_size=BLOCK_SIZE)
    config = load_decoder_config(model_dir)
    cache = KVCache(kv_layout(config, wanted), 16, DEVICE)
    parameters = dummy_weights(parameter_specs(config), WeightsTarget(DEVICE, getattr(torch, dtype)))
    model = Decoder(config, parameters, DecoderMemory(cache, TorchAttention(attention_shape(config))))
    return assemble_runner(wanted, model, cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_a_step_reads_from_the_gpu_once(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    copies = FakeCopies()
    monkeypatch.setattr("engine.model_runner.copies_for", lambda device: copies)
    has_experts = load_decoder_config(checkpoint(family)).experts is not None
    runner = load(checkpoint(family), dtype)
    with no_waiting():
        if has_experts:
            with pytest.raises((RuntimeError, NotImplementedError)):  # they are selected on the host
                runner.begin(batch())()
            return
    runner.begin(batch())()  # the first step makes constants
    copies.num_sent = 0
    copies.read.clear()
    with no_waiting():
        outputs = runner.begin(batch())()
    assert [len(output.tokens) for output in outputs] == [1] * 4
    assert copies.num_sent == 2, "the step's arrays, and the parameters of sampling"
    total, tokens, logprobs = ((), (4,), (4,))
    assert copies.read == [[total, tokens, logprobs]]
