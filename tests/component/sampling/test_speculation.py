"""With speculation the tokens, their log-probs and their alternatives are those without it, to the last bit."""

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from decode_worker.settings import DecodeSettings
from engine.batch import ScheduledBatch
from engine.engine import Engine
from engine.kv.block_pool import BlockPool
from engine.model_runner import ModelRunner
from engine.prompt_pace import PromptPace
from engine.runner import FinishBatch, LayerHook
from engine.scheduler import Scheduler
from engine.sequence import SequenceState
from engine.settings import NO_SPECULATION, SchedulerConfig, Speculation
from engine.speculation.drafters import Drafter, DraftModel, NgramDrafter
from mesh.domain.errors import ConfigurationError
from mesh.domain.request import SequenceSpec
from mesh.domain.structure import Structure, StructureKind
from mesh.domain.tokens import FinishReason, SampledToken
from mesh.domain.worker import WorkerRole
from tests.component.arms import load_arm
from tests.fakes.drafters import FakeDrafter, eager_speculator, known
from tests.fakes.requests import make_request
from tests.goodness import UNLIKELY, fit
from worker.load_engine import load_engine
from worker.runner_settings import EngineLimits

Checkpoint = Callable[[str], Path]
Answers = dict[str, tuple[list[SampledToken], FinishReason | None]]

EOS = 257
PROMPT = (5, 80, 9)
_DRAWS = {"temperature": 0.9, "top_k": 20}
_WAYS: Mapping[str, dict[str, object]] = {
    "greedy": {},
    "top log-probs": {"top_logprobs": 5},
    "draws": {"sampling": _DRAWS},
    "nucleus": {"sampling": {"temperature": 1.2, "top_p": 0.9, "min_p": 0.01}},
    "penalties": {"sampling": _DRAWS | {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}},
    "bias": {"sampling": {"logit_bias": {7: 4.0, 9: -100.0}, "min_new_tokens": 12}},
    "structure": {
        "sampling": _DRAWS | {"structure": Structure(StructureKind.REGEX, r"(to and fro |[a-z]{1,4} ){5,9}")}
    },
    "bad words": {"sampling": _DRAWS | {"typical_p": 0.8, "bad_word_ids": ((116, 111), (32,), (97, 110, 100))}},
    "stops": {"sampling": {"stop_token_ids": tuple(range(0, 257, 9)), "min_new_tokens": 9}},
}
"""One request of each: they run in one batch."""


def requests() -> list[SequenceSpec]:
    """Prompts that repeat themselves, so that looking up finds something."""
    prompts = {name: [*b"to and fro and "] * 2 + [*name.encode()] for name in _WAYS}
    return [
        make_request(name, prompts[name], max_new_tokens=40, eos_token_ids=frozenset({EOS}), **_WAYS[name])  # type: ignore[arg-type]
        for name in _WAYS
    ]


def answer(
    runner: ModelRunner, drafter: Drafter | None, asked: list[SequenceSpec], **limits: Any
) -> tuple[Answers, Scheduler]:
    """What comes of the requests, all at once, and the scheduler afterwards."""
    layout = runner.kv_cache.layout
    config = {"block_size": layout.block_size, "windows": layout.windows, "max_batch_tokens": 64, "max_num_seqs": 16}
    config |= {"state_blocks": layout.state_blocks, **limits}
    pool = BlockPool(runner.kv_cache.num_blocks)
    scheduler = Scheduler(SchedulerConfig(max_model_len=512, prefix_caching=False, **config), pool)
    speculator = None if drafter is None else eager_speculator(drafter, 4)
    engine = Engine(scheduler, runner, speculator=speculator)
    for request in asked:
        scheduler.add(SequenceState(request))
    answers: Answers = {request.request_id: ([], None) for request in asked}
    before = {request.request_id: request.num_generated for request in asked}
    while scheduler.has_work:
        result = engine.step()
        assert engine.num_step_tokens <= scheduler.config.max_batch_tokens
        for output in result.outputs:
            tokens, _ = answers[output.request_id]
            assert output.first_index == before[output.request_id] + len(tokens)
            answers[output.request_id] = ([*tokens, *output.tokens], output.finish_reason)
        scheduler.check_integrity()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks - layout.num_unused
    return answers, scheduler


def ids(answers: Answers) -> dict[str, list[int]]:
    return {name: [token.id for token in tokens] for name, (tokens, _) in answers.items()}


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        *(("llama", quantize) for quantize in ("none", "int8")),
        *((family, "none") for family in ("lfm2", "qwen3.5", "falcon-h1", "nemotron-h", "mamba2", "jamba")),
    ],
)
@pytest.mark.parametrize("mistakes", [0.0, 0.3, 1.0])
def test_guesses_change_nothing(checkpoint: Checkpoint, family: str, quantize: str, mistakes: float) -> None:
    """Recurrent states, which cannot go back, stay before the guesses; the right ones are computed again."""
    runner = load_arm(checkpoint(family), "compiled", quantize=quantize, num_blocks=400)
    plain, _ = answer(runner, None, requests())
    guessed, scheduler = answer(runner, FakeDrafter(known(ids(plain)), mistakes), requests())
    assert guessed == plain
    load = scheduler.load()
    assert load.drafted_tokens > 30
    assert (load.accepted_tokens == load.drafted_tokens) == (mistakes == 0.0)
    assert (load.accepted_tokens == 0) == (mistakes == 1.0)


@pytest.mark.parametrize(("family", "arm"), [("qwen3.5", "cpu"), ("granite-4", "torch"), ("falcon-mamba", "torch")])
def test_guesses_change_no_token_of_the_eager_decoder(checkpoint: Checkpoint, family: str, arm: str) -> None:
    """It rounds differently with the size of a batch."""
    runner = load_arm(checkpoint(family), arm, num_blocks=1200)
    plain, _ = answer(runner, None, requests())
    guessed, scheduler = answer(runner, FakeDrafter(known(ids(plain)), 0.3), requests())
    assert ids(guessed) == ids(plain)
    for name, (tokens, reason) in guessed.items():
        expected, expected_reason = plain[name]
        assert reason == expected_reason
        assert [t.logprob for t in tokens] == pytest.approx([t.logprob for t in expected], abs=1e-4)
    assert scheduler.load().accepted_tokens > 100


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", ["qwen3.5", "nemotron-h"])
def test_guesses_of_many_rows_change_nothing(checkpoint: Checkpoint, family: str, two_threads: None) -> None:
    """Threads share out the rows of steps so large, but not where a state stays before some of the rows."""
    runner = load_arm(checkpoint(family), "compiled", num_blocks=400)
    plain, _ = answer(runner, None, requests())
    guessed, scheduler = answer(runner, FakeDrafter(known(ids(plain)), 0.1), requests(), max_batch_tokens=128)
    assert guessed == plain
    assert scheduler.load().accepted_tokens > 30


@pytest.mark.parametrize(
    "limits", [{"max_num_seqs": 8, "max_batch_tokens": 10}, {"max_num_seqs": 2, "max_batch_tokens": 5}]
)
def test_looking_up_changes_nothing_and_keeps_to_the_budget(checkpoint: Checkpoint, limits: dict[str, int]) -> None:
    runner = load_arm(checkpoint("llama"), "compiled")
    plain, _ = answer(runner, None, requests())
    guessed, scheduler = answer(runner, NgramDrafter(), requests(), **limits)
    assert guessed == plain
    assert scheduler.load().drafted_tokens > 0


def test_right_guesses_that_are_computed_again_keep_to_the_budget(checkpoint: Checkpoint) -> None:
    """The next step has them, too, beside what all sequences need."""
    runner = load_arm(checkpoint("qwen3.5"), "compiled", num_blocks=400)
    plain, _ = answer(runner, None, requests())
    limits = {"max_num_seqs": 4, "max_batch_tokens": 16}
    guessed, scheduler = answer(runner, FakeDrafter(known(ids(plain))), requests(), **limits)
    assert guessed == plain
    assert scheduler.load().accepted_tokens > 50


def test_sequences_whose_tokens_are_computed_again_set_the_pace_of_prompts(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the next step as those do that compute a single token."""
    observed: list[tuple[int, int]] = []

    class ObservedPace(PromptPace):
        def observe(self, num_decoding: int, num_prompt_tokens: int, seconds: float) -> None:
            observed.append((num_decoding, num_prompt_tokens))

    monkeypatch.setattr("engine.engine.PromptPace", ObservedPace)
    runner = load_arm(checkpoint("qwen3.5"), "compiled", num_blocks=400)
    plain, _ = answer(runner, None, requests()[:1])
    observed.clear()
    answer(runner, FakeDrafter(known(ids(plain))), requests()[:1])
    assert observed[0][1] > 0
    assert len(observed) > 5
    assert set(observed[1:]) == {(1, 0)}


@pytest.mark.parametrize("family", ["llama", "qwen3.5"])
def test_replay_in_the_middle_of_guesses_changes_nothing(checkpoint: Checkpoint, family: str) -> None:
    runner = load_arm(checkpoint(family), "compiled", num_blocks=400)
    plain, _ = answer(runner, None, requests())
    num_known = 5
    again = [
        replace(
            request,
            attempt=1,
            token_ids=(*request.token_ids, *ids(plain)[request.request_id][:num_known]),
            num_prompt_tokens=len(request.token_ids),
        )
        for request in requests()
    ]
    replayed, _ = answer(runner, FakeDrafter(known(ids(plain)), mistakes=0.3), again)
    assert replayed == {name: (tokens[num_known:], reason) for name, (tokens, reason) in plain.items()}


class TooMuchWork:
    """A matcher for which the mask behind `num_left` tokens is too much work."""

    def __init__(self, matcher: LLMatcher, num_left: int) -> None:
        self._matcher = matcher
        self._num_left = num_left
        self._has_failed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)

    def deep_copy(self) -> "TooMuchWork":
        return TooMuchWork(self._matcher.deep_copy(), self._num_left)

    def consume_tokens(self, token_ids: list[int]) -> None:
        self._num_left -= len(token_ids)
        self._matcher.consume_tokens(token_ids)

    def try_consume_tokens(self, token_ids: list[int]) -> int:
        self._num_left -= len(token_ids)
        return int(self._matcher.try_consume_tokens(token_ids))

    def compute_bitmask(self) -> bytes:
        self._has_failed = self._num_left <= 0
        return bytes(self._matcher.compute_bitmask())

    def is_error(self) -> bool:
        return self._has_failed

    def get_error(self) -> str:
        return "too much work"


@pytest.mark.parametrize("num_tokens", [2, 3, 4])
def test_right_guesses_lead_behind_no_mask_that_is_too_much_work(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """Without masks, the tokens sampled behind the guesses would be any."""
    runner = load_arm(checkpoint("llama"), "compiled")
    asked = [request for request in requests() if request.sampling.structure is not None]
    whole, _ = answer(runner, None, asked)
    compiler = runner._masks._compiler
    compile_whole = compiler.compile
    monkeypatch.setattr(compiler, "compile", lambda *what: TooMuchWork(compile_whole(*what), num_tokens))
    plain, _ = answer(runner, None, asked)
    assert [len(tokens) for tokens, _ in plain.values()] == [num_tokens]
    assert answer(runner, FakeDrafter(known(ids(whole))), asked)[0] == plain


@pytest.mark.parametrize("same", [True, False])
def test_a_draft_model_changes_nothing_and_agrees_with_itself(checkpoint: Checkpoint, same: bool) -> None:
    runner = load_arm(checkpoint("llama"), "compiled")
    plain, _ = answer(runner, None, requests())
    draft = load_arm(checkpoint("llama" if same else "llama-tied"), "compiled")
    guessed, scheduler = answer(
        runner, DraftModel(draft, runner.kv_cache.layout, max_model_len=512, max_batch_tokens=20), requests()
    )
    assert guessed == plain
    load = scheduler.load()
    assert load.drafted_tokens > 30
    assert (load.accepted_tokens == load.drafted_tokens) == same  # draws included: both models make the same


def test_a_draft_model_leaves_the_blocks_of_states_alone(checkpoint: Checkpoint) -> None:
    runner, draft = load_arm(checkpoint("lfm2"), "compiled"), load_arm(checkpoint("llama"), "compiled")
    states = runner.kv_cache.layout.state_blocks
    plain, _ = answer(runner, None, requests()[:3])
    held: set[int] = set()
    begin, begin_draft = runner.begin, draft.begin

    def note_states(batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        held.update(block for item in batch.items for block in item.sequence.block_table[:states])
        return begin(batch, on_layers)

    def check_blocks(batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        assert held.isdisjoint(block for item in batch.items for block in item.sequence.block_table)
        return begin_draft(batch, on_layers)

    runner.begin, draft.begin = note_states, check_blocks  # type: ignore[method-assign]
    drafter = DraftModel(draft, runner.kv_cache.layout, max_model_len=512, max_batch_tokens=20)
    guessed, scheduler = answer(runner, drafter, requests()[:3])
    assert guessed == plain
    assert scheduler.load().drafted_tokens > 0
    assert len(held) == 3 * states


def test_each_model_of_a_thread_has_its_own_number_of_threads(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled decoder wants one for torch, an eager one all."""
    seen: dict[str, set[int]] = {"large": set(), "draft": set()}
    runners = {}
    for name, num_threads in (("large", 2), ("draft", 1)):
        model = (runner := load_arm(checkpoint("llama"), "torch")).model
        model.num_torch_threads = num_threads

        def begin(*arguments: Any, name: str = name, compute: Callable[..., Any] = model.begin) -> Any:
            seen[name].add(torch.get_num_threads())
            return compute(*arguments)

        monkeypatch.setattr(model, "begin", begin)
        runners[name] = runner
    before = torch.get_num_threads()
    try:
        layout = runners["large"].kv_cache.layout
        drafter = DraftModel(runners["draft"], layout, max_model_len=512, max_batch_tokens=64)
        answer(runners["large"], drafter, requests()[:1])
    finally:
        torch.set_num_threads(before)
    assert seen == {"large": {2}, "draft": {1}}


def test_a_draft_model_guesses_no_further_than_it_can_see(checkpoint: Checkpoint) -> None:
    runner, draft = (load_arm(checkpoint("llama"), "compiled") for _ in range(2))
    [request] = [each for each in requests() if each.request_id == "greedy"]
    most = len(request.token_ids) + 10
    _, scheduler = answer(
        runner, DraftModel(draft, runner.kv_cache.layout, max_model_len=most, max_batch_tokens=64), [request]
    )
    assert 5 <= scheduler.load().drafted_tokens <= 10


def follow_ups(runner: ModelRunner) -> dict[tuple[int, ...], dict[int, float]]:
    """What may come after the prompt and up to two more tokens, and how likely that is where the top three are drawn:
    from the model's log-probs.
    """
    found: dict[tuple[int, ...], dict[int, float]] = {}
    paths: list[tuple[int, ...]] = [()]
    for _ in range(3):
        asked = [make_request(str(path), (*PROMPT, *path), max_new_tokens=1, top_logprobs=3) for path in paths]
        answers, _ = answer(runner, None, asked)
        for path in paths:
            top = answers[str(path)][0][0].top
            total = sum(exp(each.logprob) for each in top)
            found[path] = {each.id: exp(each.logprob) / total for each in top}
        paths = [(*path, token) for path in paths for token in found[path]]
    return found


@pytest.mark.parametrize("guesses", ["none", "one of the three", "a draft model"])
def test_drawn_triples_fit_the_exact_distribution(checkpoint: Checkpoint, guesses: str) -> None:
    """Three tokens drawn in turn: one after the prompt, one where a guess is checked, one behind it."""
    runner = load_arm(checkpoint("llama"), "compiled")
    tree = follow_ups(runner)
    drafter: Drafter | None = None
    if guesses == "one of the three":
        drafter = FakeDrafter(lambda sequence, most: sorted(tree[tuple(sequence.token_ids[len(PROMPT) :])])[1:][:most])
    elif guesses == "a draft model":
        draft = load_arm(checkpoint("llama-tied"), "compiled")
        drafter = DraftModel(draft, runner.kv_cache.layout, max_model_len=64, max_batch_tokens=64)
    plain = [make_request(str(seed), PROMPT, max_new_tokens=3) for seed in range(1500)]
    asked = [
        replace(request, sampling=replace(request.sampling, seed=seed, temperature=1.0, top_k=3))
        for seed, request in enumerate(plain)
    ]
    drawn, scheduler = answer(runner, drafter, asked, max_num_seqs=48)
    counts = Counter(map(tuple, ids(drawn).values()))
    exact = {
        (first, second, third): tree[()][first] * tree[first,][second] * probability
        for first, second in (path for path in tree if len(path) == 2)
        for third, probability in tree[first, second].items()
    }
    assert counts.keys() <= exact.keys()
    assert fit([counts[triple] for triple in exact], list(exact.values())) > UNLIKELY
    load = scheduler.load()
    assert (load.drafted_tokens > 400) == (guesses != "none")
    assert load.accepted_tokens < max(1, load.drafted_tokens)


def test_a_draft_model_shares_the_memory_for_kv(checkpoint: Checkpoint) -> None:
    def num_blocks(draft_model: Path | None) -> int:
        settings = DecodeSettings(model=str(checkpoint("llama")), registry_address="none", kv_cache_bytes=1 << 20)
        speculation = Speculation("draft", 4, draft_model) if draft_model else NO_SPECULATION
        limits = EngineLimits(64, 4, speculation=speculation)
        loaded = load_engine(settings, limits)
        info = loaded.worker_info(WorkerRole.DECODE, limits)
        assert (info.num_blocks, info.speculative) == (loaded.scheduler.pool.num_blocks, speculation.kind)
        return info.num_blocks

    # The draft model has half of the large one's heads for keys and values.
    assert num_blocks(checkpoint("qwen2")) == num_blocks(None) * 2 // 3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", ('"vocab_size": 264', '"vocab_size": 265'), "vocab_size 265, not 264"),
        ("tokenizer.json", ("<pad>", "<fill>"), "tokenizer_fingerprint"),
    ],
)
def test_a_draft_model_of_other_tokens_is_refused(
    checkpoint: Checkpoint, tmp_path: Path, name: str, change: tuple[str, str], message: str
) -> None:
    other = Path(shutil.copytree(checkpoint("llama"), tmp_path / "other"))
    text = (other / name).read_text()
    assert change[0] in text
    (other / name).write_text(text.replace(*change))
    settings = DecodeSettings(model=str(checkpoint("llama")), registry_address="none")
    with pytest.raises(ConfigurationError, match=f"draft_model {other} does not fit .*{message}"):
        load_engine(settings, EngineLimits(64, 4, speculation=Speculation("draft", 4, other)))
