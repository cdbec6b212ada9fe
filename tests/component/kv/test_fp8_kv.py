"""KV in fp8: how close the eager decoder stays to fp32, the scales of KV, and replays, which repeat every token."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from engine.kv.dtypes import FP8, as_stored
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout
from engine.memory import DeviceMemory
from engine.models.read_config import load_config
from engine.runner_settings import RunnerSettings
from engine.settings import KVMemorySettings
from kvtransfer import ExpectedTransfer, KVReceiver, KVSender, TransferSettings, TransferSpec
from mesh.domain.errors import ConfigurationError, LayoutMismatch
from mesh.domain.kv import Degrees, Span
from mesh.rpc.credentials import Credentials
from tandem_cli.main import main
from tests.component.arms import load_arm, settings
from tests.component.driving import Driver
from tests.component.kv.kv_moves import continue_from
from tests.component.parity import logprob_differences, prompts, run_mixed
from tests.component.ranks.ranked import ranked_runner
from tests.component.test_load import edit_weights
from tests.fakes.requests import make_request
from tests.fakes.transfers import FIRST_TOKEN, INCARNATION, Outcomes
from tests.service.transfer_pair import KEY, serving

Checkpoint = Callable[[str], Path]
Tensors = dict[str, torch.Tensor]

NUM_NEW = 12
LAYERS = range(3)
# Of log-probs, the mean and the largest difference that rounding KV makes: to 3 bits, 16 times as coarse as bf16.
BOUNDS = (0.15, 0.8)
# Of log-probs after a replay: sums of other numbers of rows differ in the last bit, which may tip the rounding of KV.
TIPPED = {"fp8": 0.02, "float16": 0.002}


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Callable[[str], Path]:
    """`copy(name)` is a Llama in a folder of that name, which a test may change."""
    return lambda name: Path(shutil.copytree(checkpoint("llama"), tmp_path / name))


def scaled(model_dir: Path, name: str = "self_attn.{}_scale", **scales: float | list[float]) -> Path:
    """Give the checkpoint scales of keys and values, by `k` and `v`."""

    def add(tensors: Tensors) -> None:
        for layer in LAYERS:
            for kind, scale in scales.items():
                tensors[f"model.layers.{layer}.{name.format(kind)}"] = torch.tensor(scale)

    edit_weights(model_dir, add)
    return model_dir


def enlarge_kv(factor: float) -> Callable[[Tensors], None]:
    """Larger keys and values, which queries and the output matrix make up for."""

    def change(tensors: Tensors) -> None:
        for layer in LAYERS:
            for module, by in (("k", factor), ("v", factor), ("q", 1 / factor), ("o", 1 / factor)):
                tensors[f"model.layers.{layer}.self_attn.{module}_proj.weight"] *= by

    return change


@pytest.mark.parametrize("family", ["llama-tied", "mistral", "qwen3"])
def test_models_stay_close_to_those_with_fp32_kv(checkpoint: Checkpoint, family: str) -> None:
    exact, near = (run_mixed(load_arm(checkpoint(family), "torch", kv_dtype=name)) for name in ("float32", "fp8"))
    mean, largest = logprob_differences(near, exact)
    assert 0 < mean < BOUNDS[0]
    assert largest < BOUNDS[1]


def test_numbers_that_are_too_large_saturate_and_nan_stays() -> None:
    rows = torch.tensor([0.0, -1e9, torch.inf, 447.0, 463.0, 0.001, 2**-10, torch.nan])
    assert as_stored(rows, FP8).float().tolist()[:-1] == [0.0, -448.0, 448.0, 448.0, 448.0, 2**-9, 0.0]
    assert as_stored(rows, FP8)[-1].isnan()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_sent_prompt_continues_as_if_it_had_stayed(
    checkpoint: Checkpoint, tmp_path: Path, transport: str
) -> None:
    """To the bit, through a real sender and receiver."""
    wanted, prompt = settings(checkpoint("mistral"), kv_dtype="fp8"), prompts()[2]
    here, there = Driver(load_model_runner(wanted), seed=1), Driver(load_model_runner(wanted), seed=2)
    whole, moved = (driver.add(make_request("r", prompt, max_new_tokens=NUM_NEW)) for driver in (here, there))
    here.step((whole, len(prompt)))
    there.reserve(moved.sequence, len(prompt))
    source, target = here.runner.kv_cache, there.runner.kv_cache
    sent = source.layout.transfer_entries(len(prompt))
    from_blocks, to_blocks = (tuple(run.sequence.block_table[entry] for entry in sent) for run in (whole, moved))
    limits, outcomes = TransferSettings(transports=(transport,), shm_dir=str(tmp_path)), Outcomes()
    receiver = KVReceiver(target, INCARNATION, outcomes.callbacks(), limits)
    async with serving(receiver) as server:
        sender = KVSender(source, "prefill-0", Credentials(KEY), limits)
        receiver.expect(ExpectedTransfer("t", 1, to_blocks, 0, len(prompt)))
        transfer = sender.open(TransferSpec("t", 1, server.address, INCARNATION, from_blocks, source.layout.whole))
        transfer.announce(Span(0, len(from_blocks)), source.span.layers)
        result = await transfer.commit(len(prompt), FIRST_TOKEN)
        await sender.close()
        await receiver.close()
    assert (result.transport, result.num_bytes) == (transport, len(from_blocks) * source.layout.block_bytes)
    continue_from(moved, whole)
    here.finish(whole)
    there.finish(moved)
    assert moved.tokens == whole.tokens


@pytest.mark.parametrize("kv_dtype", ["fp8", "float16"])
@pytest.mark.parametrize("num_said", [1, 5])
def test_a_replay_repeats_every_token(checkpoint: Checkpoint, kv_dtype: str, num_said: int) -> None:
    """What was decoded token by token is computed again as one prompt, or in chunks, after a worker is lost."""
    runner = load_arm(checkpoint("mistral"), "torch", kv_dtype=kv_dtype)
    prompt = prompts()[1]
    for chunk in (1000, 7):
        driver = Driver(runner)
        first = driver.add(make_request("first", prompt, max_new_tokens=NUM_NEW))
        driver.finish(first)
        replayed = first.token_ids[:num_said]
        again = driver.add(make_request("again", [*prompt, *replayed], max_new_tokens=NUM_NEW - num_said))
        driver.finish(again, chunk=chunk)
        assert replayed + again.token_ids == first.token_ids
        later = [token.logprob for token in first.tokens[num_said:]]
        assert [token.logprob for token in again.tokens] == pytest.approx(later, abs=TIPPED[kv_dtype])


def test_ranks_say_what_one_rank_says(copy: Checkpoint) -> None:
    model_dir = scaled(copy("model"), k=0.3, v=0.02)
    alone = run_mixed(load_arm(model_dir, "torch", block_size=16, kv_dtype="fp8"))
    with ranked_runner(model_dir, Degrees(2, 2), kv_dtype="fp8", enforce_eager=True) as runner:
        together = run_mixed(runner)
    assert [run.token_ids for run in together] == [run.token_ids for run in alone]


def test_twice_as_many_blocks_fit_as_in_fp16(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = DeviceMemory("cpu", total_bytes=64 << 20, free_bytes=64 << 20, is_lazy=True)
    monkeypatch.setattr("engine.kv.budget.device_memory", lambda _: machine)
    caches = {}
    for name in ("float16", "fp8"):
        memory = KVMemorySettings(fraction=0.5, ledger=str(tmp_path / name))
        wanted = settings(checkpoint("llama"), kv_dtype=name, attention="torch", num_blocks=None, kv_memory=memory)
        caches[name] = load_model_runner(wanted).kv_cache
    halves, bytes_ = caches["float16"], caches["fp8"]
    assert bytes_.layout.block_bytes * 2 == halves.layout.block_bytes
    assert bytes_.num_blocks - 2 * halves.num_blocks in (0, 1)
    assert halves.tensor.nbytes - bytes_.tensor.nbytes < halves.layout.block_bytes


@pytest.mark.parametrize(
    "name", ["self_attn.{}_scale", "self_attn.{0}_proj.{0}_scale", "self_attn.{}_proj.output_scale"]
)
def test_scales_of_the_checkpoint_are_used(copy: Checkpoint, name: str) -> None:
    """Keys and values of the second model are those of the first times a power of two, so all is equal to the bit."""
    plain, large = copy("plain"), copy("large")
    expected = run_mixed(load_arm(plain, "torch", kv_dtype="fp8"))
    edit_weights(large, enlarge_kv(2.0**12))
    assert logprob_differences(run_mixed(load_arm(large, "torch", kv_dtype="fp8")), expected)[1] > BOUNDS[1]
    with capture_logs() as logs:
        runner = load_arm(scaled(large, name, k=2.0**12, v=2.0**12), "torch", kv_dtype="fp8")
    assert [line["layers_of_checkpoint"] for line in logs if "scales of KV" in line["event"]] == [len(LAYERS)]
    assert logprob_differences(run_mixed(runner), expected) == (0, 0)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), [1.0, 2.0]])
def test_scales_that_are_none_are_refused(copy: Checkpoint, scale: float | list[float]) -> None:
    model_dir = scaled(copy("model"), v=scale)
    with pytest.raises(ConfigurationError, match=r"layers.0.self_attn.v_scale must be one number above 0.* kv_dtype"):
        load_arm(model_dir, "torch", kv_dtype="fp8")
    load_arm(model_dir, "torch", kv_dtype="float16")


def test_workers_with_other_scales_do_not_fit(copy: Checkpoint) -> None:
    model_dir = copy("model")
    config, layouts = load_config(model_dir), []
    for k in (1.0, 2.0):
        layouts.append(kv_layout(config, settings(scaled(model_dir, k=k), kv_dtype="fp8")))
    with pytest.raises(LayoutMismatch, match=r"^KV layouts differ: model_fingerprint: '.*' here, '.*' there$"):
        layouts[0].require_same(layouts[1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantize": "int4"}, "quantize=int4 is for the compiled decoder, which cannot run here .KV in fp8, not"),
        ({"attention": "cpu"}, "'cpu' cannot run.*KV in fp8.*available: torch"),
    ],
)
def test_the_compiled_kernels_refuse_it(checkpoint: Checkpoint, changes: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_model_runner(RunnerSettings(checkpoint("llama"), num_blocks=4, kv_dtype="fp8", **changes))  # type: ignore[arg-type]


def test_a_partition_refuses_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert main(["partition", str(checkpoint("llama")), str(tmp_path / "out")]) == 0
    with pytest.raises(ConfigurationError, match=r"partitioned for the compiled decoder, .*\(KV in fp8, .*original"):
        load_model_runner(settings(tmp_path / "out", kv_dtype="fp8"))


def test_the_log_says_why_the_decoder_is_not_compiled(checkpoint: Checkpoint) -> None:
    with capture_logs() as logs:
        load_model_runner(settings(checkpoint("llama"), kv_dtype="fp8"))
    [line] = [line for line in logs if line["event"] == "decoder not compiled"]
    assert line["reason"] == "KV in fp8, not float32, float16, int8"
