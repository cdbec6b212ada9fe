"""Triton kernels in Triton's interpreter, on CPU; run by test_triton_attention.py in a process of its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError

from engine.attention import triton_kernels, triton_paged
from engine.attention.backend import AttentionBackend, AttentionShape
from engine.attention.torch_sdpa import TorchAttention
from engine.attention.triton_paged import FEW_QUERIES, SPLIT_TOKENS, TritonAttention
from engine.batch import ScheduledBatch, ScheduledSequence
from engine.kv.dtypes import FP8, as_bytes, as_stored
from engine.loading.load_runner import load_model_runner
from engine.sequence import SequenceState
from engine.settings import GraphSettings
from engine.speculation.drafters import NgramDrafter
from engine.speculation.speculator import Speculator
from tests.component import arms, parity
from tests.component.encoder_decoders import EncoderDecoderReference, build_encoder_decoder
from tests.component.kv.test_forks import choices, run
from tests.component.parity import check_parity
from tests.component.test_encoder_decoder import require_same, run_mixed
from tests.component.without_gpu.mistakes import changed
from tests.component.without_gpu.paged_attention import Case, attend, change_beside_others, random_inputs, require_near
from tests.component.without_gpu.test_decode_graphs import Traffic, load, require_same_kv, require_same_steps
from tests.fakes.requests import make_request
from tests.fakes.tape import TapeCapture

CPU = torch.device("cpu")
GROUPED = AttentionShape(3, 1, 16)
TWO_GROUPS = AttentionShape(6, 2, 16)
FORCED = {"attention": "triton", "num_blocks": 160}
# Around the ends of blocks and splits.
DECODES = [(end - 1, end) for end in (1, 16, 17, SPLIT_TOKENS, SPLIT_TOKENS + 1, 2 * SPLIT_TOKENS + 3)]
CHUNKS = [(0, 17), (250, 262), (250, 272)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Steps of up to two decodes and two chunks."""
    group, num_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 7])), draw(st.integers(1, 2))
    num_heads = group * num_kv_heads
    alibi = draw(st.sampled_from([None, tuple(2.0 ** -(i + 1) for i in range(num_heads))]))
    shape = AttentionShape(
        num_heads,
        num_kv_heads,
        draw(st.sampled_from([8, 16, 24, 32])),
        given_scale=draw(st.sampled_from([None, 0.1])),
        softcap=draw(st.sampled_from([None, None, 4.0, 30.0])),
        alibi=alibi,
        has_sinks=draw(st.booleans()),
    )
    ends = draw(st.lists(st.integers(1, 600), max_size=2))
    starts = draw(st.lists(st.integers(0, 600), min_size=0 if ends else 1, max_size=2))
    chunks = [(start, start + draw(st.integers(2, 40))) for start in starts]
    return Case(
        shape,
        [(end - 1, end) for end in ends] + chunks,
        block_size=draw(st.sampled_from([16, 32, 64, 256])),
        window=draw(st.one_of(st.none(), st.integers(1, 400))),
        dtype=draw(st.sampled_from([torch.float32, torch.float16])),
        kv_dtype=draw(st.sampled_from([None, None, FP8])),
    )


@settings(max_examples=10, derandomize=True)
@given(cases())
def test_any_step(case: Case) -> None:
    require_near(case, CPU)


@pytest.mark.soak
@settings(max_examples=400, derandomize=True)
@given(cases())
def test_any_of_many_steps(case: Case) -> None:
    require_near(case, CPU)


@pytest.mark.parametrize(
    ("window", "block_size"),
    [(None, 24), (None, 256), (1, 16), (17, 16), (SPLIT_TOKENS, 32), (SPLIT_TOKENS + 2, 64)],
)
def test_ends_of_blocks_and_splits(window: int | None, block_size: int) -> None:
    require_near(Case(GROUPED, DECODES + CHUNKS, block_size, window), CPU)


@pytest.mark.parametrize(
    "shape",
    [
        AttentionShape(4, 4, 80),
        AttentionShape(20, 1, 16),
        AttentionShape(71, 1, 8),
        AttentionShape(2, 1, 256),
        TWO_GROUPS,
        AttentionShape(4, 2, 16, given_scale=0.5, softcap=3.0, alibi=(0.5, 0.25, 0.1, 0.05), has_sinks=True),
        AttentionShape(6, 2, 16, has_sinks=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shapes(shape: AttentionShape, dtype: torch.dtype) -> None:
    require_near(Case(shape, [(0, 1), (269, 270), (3, 10), (250, 268)], window=40, dtype=dtype), CPU)


MISTAKES = {
    "a query sees the next token": ("<= position)", "<= position + 1)"),
    "a window is wider by one": ("> position - WINDOW", ">= position - WINDOW"),
    "heads at the stride of rows": ("head * query_head_stride\n    q = ", "head * query_stride\n    q = "),
    "keys taken for values": ("_load_cached(k_at + values_at,", "_load_cached(k_at,"),
    "places in a block of another size": ("key % BLOCK_SIZE", "key % 16"),
    "tiles joined without their maxima": ("total * decay + tl.sum(weights, 1)", "total + tl.sum(weights, 1)"),
    "splits joined without their maxima": ("tl.sum(weights[:, None] * sums, 0)", "tl.sum(sums, 0)"),
    "the last split left out": ("end = 0, position // SPLIT + 1", "end = 0, tl.maximum(position // SPLIT, 1)"),
    "values written beside their slot": ("tl.store(to + values_at, value", "tl.store(to + values_at + ROW, value"),
}


@pytest.mark.parametrize("mistake", ["", *MISTAKES])
def test_a_mistake_in_a_kernel_would_be_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mistake: str
) -> None:
    kernels = changed(triton_kernels, tmp_path, *([MISTAKES[mistake]] if mistake else []))
    monkeypatch.setattr(triton_paged, "import_module", lambda name: kernels)
    case = Case(GROUPED, [(599, 600), (10, 30)], block_size=32, window=300)
    if not mistake:
        require_near(case, CPU)
        return
    # Some read what nobody has written, which may be no numbers: the interpreter stops at those.
    with pytest.raises((AssertionError, InterpreterError), match=r"differs|invalid value"):
        require_near(case, CPU)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("make", [lambda shape: TritonAttention(shape, CPU), TorchAttention], ids=["triton", "torch"])
def test_a_key_that_does_not_fit(make: Callable[[AttentionShape], AttentionBackend], softcap: float | None) -> None:
    """Its value is NaN: softmax may make any number of its score."""
    case = Case(replace(GROUPED, softcap=softcap), [(0, 17)], kv_dtype=torch.float16)
    given = random_inputs(case, CPU)
    given.keys[5, 0, 3] = -1e6
    arguments = given.queries, given.keys, given.values, given.cache, None, given.metadata
    with np.errstate(invalid="ignore", over="ignore"):  # of the interpreter
        out = make(case.shape).attend(*arguments)
    assert out[5:].isnan().all()


@pytest.mark.parametrize("kv_dtype", [torch.float16, FP8])
def test_kv_of_another_type_than_queries(kv_dtype: torch.dtype) -> None:
    require_near(Case(GROUPED, DECODES + CHUNKS, kv_dtype=kv_dtype), CPU)


def every_fp16() -> torch.Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16)


def beside_ties() -> torch.Tensor:
    """fp32 halfway between neighbours of fp8, and the numbers next to it."""
    fp8 = torch.arange(127, dtype=torch.uint8).view(FP8).float()
    ties = (fp8[1:] + fp8[:-1]) / 2
    beside = [ties, *(torch.nextafter(ties, torch.tensor(away)) for away in (0.0, 500.0))]
    return torch.cat([*beside, torch.tensor([448.0, 463.9, 464.0, 1e30, torch.inf, torch.nan, 1e-45, 0.0])])


@pytest.mark.parametrize("numbers", [every_fp16(), every_fp16().float(), beside_ties(), -beside_ties()], ids=len)
def test_fp8_is_rounded_as_torch_rounds(numbers: torch.Tensor) -> None:
    shape = AttentionShape(32, 32, 64)
    keys = torch.nn.functional.pad(numbers, (0, -len(numbers) % (32 * 64))).view(-1, 32, 64)
    cache = torch.zeros(2, len(keys), 1, 32, 64).to(FP8)
    TritonAttention(shape, CPU).write(keys, -keys, cache, torch.arange(len(keys)))
    wanted = torch.stack([as_stored(keys, FP8), as_stored(-keys, FP8)]).view(cache.shape)
    is_nan = wanted.float().isnan()
    assert torch.equal(cache.float().isnan(), is_nan)
    assert torch.equal(as_bytes(cache)[~is_nan], as_bytes(wanted)[~is_nan])


@pytest.mark.parametrize("window", [None, 100])
def test_a_token_does_not_depend_on_the_batch(window: int | None) -> None:
    # numpy's matrix product rounds by a row's place in the tile, so these drafts leave it where a decode has it.
    for num_drafts in (0, 5, FEW_QUERIES - 1):
        assert change_beside_others(Case(TWO_GROUPS, [(299, 300)], window=window), num_drafts, CPU) == 0.0
    assert change_beside_others(Case(TWO_GROUPS, [(299, 300)], window=window), 2, CPU) < 1e-6


@pytest.mark.parametrize("window", [None, 600])
def test_splits_are_joined_some_at_once(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    monkeypatch.setattr(triton_paged, "_SPLITS_AT_ONCE", 2)
    require_near(Case(GROUPED, [(0, 1), (1299, 1300)], 64, window), CPU)


@pytest.mark.parametrize("window", [None, 600])
def test_programs_take_turns_at_splits_of_a_graph_for_longer_contexts(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    case = Case(GROUPED, [*DECODES, (1299, 1300)], window=window)
    given = random_inputs(case, CPU)
    exact = attend(case, given, CPU)
    monkeypatch.setattr(triton_paged, "_MAX_PROGRAMS", 2 * len(case.work))
    longer = replace(given, metadata=replace(given.metadata, max_decode_context=1 << 17))
    assert torch.equal(attend(case, longer, CPU), exact)


def test_sequences_take_turns_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(GROUPED, DECODES + CHUNKS, window=300)
    at_once = attend(case, random_inputs(case, CPU), CPU)
    monkeypatch.setattr(triton_paged, "_MAX_PARTIALS", 300)  # those of two decodes, or of one chunk
    assert torch.equal(attend(case, random_inputs(case, CPU), CPU), at_once)


def test_nothing_is_written_without_keys() -> None:
    inputs = random_inputs(Case(GROUPED, [(4, 5)]), CPU)
    before = inputs.cache.clone()
    TritonAttention(GROUPED, CPU).write(inputs.keys[:0], inputs.values[:0], inputs.cache, inputs.metadata.slot_mapping)
    assert torch.equal(inputs.cache.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(pytest.param(name, marks=pytest.mark.soak) for name in ("llama-multi-query", "qwen2-window", "bloom")),
    ],
)
def test_models_say_what_transformers_says(checkpoint: Callable[[str], Path], family: str) -> None:
    runner = load_model_runner(arms.settings(checkpoint(family), **FORCED))
    assert runner.attention_backend == "triton"
    check_parity(checkpoint(family), runner)


def test_models_with_fp8_kv_say_what_torch_says(checkpoint: Callable[[str], Path]) -> None:
    asked = {"enforce_eager": True, "kv_dtype": "fp8", "num_blocks": 160}
    ours, theirs = (
        parity.run_mixed(load_model_runner(arms.settings(checkpoint("gemma2"), attention=name, **asked)))
        for name in ("triton", "torch")
    )
    assert [run.token_ids for run in ours] == [run.token_ids for run in theirs]
    assert parity.logprob_differences(ours, theirs)[0] < 1e-3


@pytest.mark.soak
def test_encoder_decoder(tmp_path: Path) -> None:
    model_dir = build_encoder_decoder("t5", tmp_path)
    theirs = EncoderDecoderReference.load(model_dir)
    for one in run_mixed(load_model_runner(arms.settings(model_dir, **FORCED))):
        require_same(one, theirs)


def test_a_captured_step_verifies_drafts(checkpoint: Callable[[str], Path]) -> None:
    capture, graphs = TapeCapture(), GraphSettings((2,), 40, max_drafts=2)
    model_dir = checkpoint("llama-multi-query")
    plain, graphed = (load(model_dir, wanted, graphs, attention="triton") for wanted in (None, capture))
    batch = ScheduledBatch((drafted("a", 0, 9, ()), drafted("b", 1, 6, (3, 9))))
    for one, other in zip(graphed.begin(batch)(), plain.begin(batch)(), strict=True):
        assert [token.id for token in one.tokens] == [token.id for token in other.tokens]
        assert [token.logprob for token in one.tokens] == pytest.approx([t.logprob for t in other.tokens], abs=1e-4)
    assert {len(graph.hidden): graph.num_replays for graph in capture.graphs} == {6: 1, 2: 0}


def drafted(name: str, number: int, num_tokens: int, drafts: tuple[int, ...]) -> ScheduledSequence:
    sequence = SequenceState(make_request(name, range(num_tokens), max_new_tokens=8))
    sequence.block_table += range(5 * number, 5 * number + 5)
    return ScheduledSequence(sequence, num_tokens - 1, 1 + len(drafts), drafts)


@pytest.mark.soak
def test_steps_with_drafts_are_the_same_with_and_without_graphs(checkpoint: Callable[[str], Path]) -> None:
    """Captured for contexts of two splits."""
    capture, graphs = TapeCapture(), GraphSettings((1, 4), 300, max_drafts=2)
    plain, graphed = (load(checkpoint("llama"), wanted, graphs, attention="triton") for wanted in (None, capture))
    require_same_steps(plain, graphed, Traffic(seed=1, drafted=0.4, num_drafts=2), 60)
    require_same_kv(plain.kv_cache.tensor, graphed.kv_cache.tensor)
    assert {len(graph.hidden) for graph in capture.graphs if graph.num_replays} == {1, 3, 4, 12}


def test_forks_are_those_of_torch(checkpoint: Callable[[str], Path]) -> None:
    said = []
    for attention in ("triton", "torch"):
        runner = load_model_runner(
            arms.settings(checkpoint("llama-multi-query"), enforce_eager=True, attention=attention)
        )
        first = SequenceState(choices(33))
        first.forks = [SequenceState(fork) for fork in choices(33).forked()]
        tokens, _ = run(runner, [first], Speculator(NgramDrafter(), 4))
        said.append({name: [token.id for token in each] for name, each in tokens.items()})
    assert said[0] == said[1]
