"""Structured output on random models: whatever they would rather say, what comes out fits."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from tokenizers import Tokenizer

from bench.masks import measure, write_vocabulary
from checkpoint.grammar import GrammarCompiler
from engine.loading.load_runner import load_model_runner
from engine.model_runner import ModelRunner
from engine.sampling.masks import TokenMasks
from engine.sampling.sampler import Sampler
from engine.sequence import SequenceState
from mesh.domain.request import SequenceSpec
from mesh.domain.structure import Structure, StructureKind
from tests.component.arms import settings
from tests.component.checkpoints import EOS_TOKEN_ID, VOCAB_SIZE
from tests.component.driving import Driver, Run
from tests.component.sampling.plain_sampling import sample
from tests.fakes.requests import make_request

PROMPT = [72, 101, 108, 108, 111]
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "zip": {"anyOf": [{"type": "string", "pattern": "^[0-9]{5}$"}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags", "zip"],
    "additionalProperties": False,
}


def schema(content: Any) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(content))


def fits_person(text: str) -> bool:
    return jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text))


LARK = 'start: "x" "=" sum\nsum: NUMBER ("+" NUMBER)~1..3\nNUMBER: /[0-9]{1,3}/'
CASES: dict[str, tuple[Structure, Callable[[str], Any]]] = {
    "schema": (schema(PERSON), fits_person),
    "regex": (
        Structure(StructureKind.REGEX, r"(\d{2,4}-)+[é-ü]{1,3}!"),
        re.compile(r"(\d{2,4}-)+[é-ü]{1,3}!").fullmatch,
    ),
    "choice": (
        Structure(StructureKind.CHOICE, choices=("yes", 'no ("really") \\d', "не знаю")),
        {"yes", 'no ("really") \\d', "не знаю"}.__contains__,
    ),
    "grammar": (Structure(StructureKind.GRAMMAR, LARK), re.compile(r"x=\d{1,3}(\+\d{1,3}){1,3}").fullmatch),
}


@pytest.fixture(scope="module")
def runner(checkpoint: Callable[[str], Path]) -> ModelRunner:
    return load_model_runner(settings(checkpoint("qwen2"), num_blocks=160))


@pytest.fixture(scope="module")
def text_of(checkpoint: Callable[[str], Path]) -> Callable[[list[int]], str]:
    tokenizer = Tokenizer.from_file(str(checkpoint("qwen2") / "tokenizer.json"))
    return lambda ids: tokenizer.decode([id_ for id_ in ids if id_ != EOS_TOKEN_ID])


def asked(name: str, structure: Structure | None, *, max_new_tokens: int = 400, **sampling: Any) -> SequenceSpec:
    request = make_request(
        name, PROMPT, max_new_tokens=max_new_tokens, eos_token_ids=frozenset({EOS_TOKEN_ID}), top_logprobs=2
    )
    values = {"temperature": 1.0, "seed": 3, "structure": structure} | sampling
    return replace(request, sampling=replace(request.sampling, **values))


def generate(runner: ModelRunner, *requests: SequenceSpec) -> list[Run]:
    """All in one batch, each until its end; tokens that were generated before take the path they took then."""
    driver = Driver(runner)
    runs = [driver.add(request) for request in requests]
    while waiting := [run for run in runs if not is_over(run)]:
        work = [(run, 1 if run.sequence.num_computed_tokens else len(PROMPT)) for run in waiting]
        driver.step(*sorted(work, key=lambda pair: pair[1] > 1))
    for run in runs:
        runner.forget(run.sequence)
    return runs


def is_over(run: Run) -> bool:
    ended = run.token_ids[-1:] == [EOS_TOKEN_ID]
    return ended or run.sequence.num_tokens >= run.sequence.spec.max_total_tokens


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"seed": 1}, {"seed": 2, "top_k": 5, "repetition_penalty": 1.5}]
)
def test_every_text_fits_and_ends(
    runner: ModelRunner, text_of: Callable[[list[int]], str], case: str, sampling: dict[str, Any]
) -> None:
    structure, fits = CASES[case]
    (run,) = generate(runner, asked("r", structure, **sampling))
    assert run.token_ids[-1] == EOS_TOKEN_ID
    assert fits(text_of(run.token_ids)), text_of(run.token_ids)


def test_json_objects_are_json_as_far_as_they_go(runner: ModelRunner, text_of: Callable[[list[int]], str]) -> None:
    """A random model may never close one; what there is must be the beginning of one."""
    (run,) = generate(runner, asked("r", Structure(StructureKind.JSON_OBJECT), max_new_tokens=60))
    text = text_of(run.token_ids)
    assert text.startswith("{")
    if run.token_ids[-1] == EOS_TOKEN_ID:
        assert isinstance(json.loads(text), dict)


def test_a_replay_at_any_token_goes_on_bit_for_bit(runner: ModelRunner) -> None:
    request = asked("r", CASES["schema"][0], repetition_penalty=1.2)
    (whole,) = generate(runner, request)
    assert len(whole.tokens) > 20
    for num_known in (1, 2, 7, len(whole.tokens) - 1):
        again = replace(request, attempt=1, token_ids=(*PROMPT, *whole.token_ids[:num_known]))
        (rest,) = generate(runner, again)
        assert rest.tokens == whole.tokens[num_known:]


def test_rows_without_a_structure_do_not_change(runner: ModelRunner) -> None:
    plain = [asked("a", None, max_new_tokens=30), asked("b", None, max_new_tokens=30, temperature=0.0)]
    alone = [run.token_ids for run in generate(runner, *plain)]
    structured = [asked(case, structure) for case, (structure, _) in CASES.items()]
    mixed = generate(runner, plain[0], *structured, plain[1])
    assert [mixed[0].token_ids, mixed[-1].token_ids] == alone
    assert [run.token_ids for run in mixed[1:-1]] == [generate(runner, each)[0].token_ids for each in structured]


def test_log_probs_are_the_models_own(runner: ModelRunner) -> None:
    """The first token is forced; it and its alternatives are scored as if it were not."""
    free, forced = generate(
        runner, asked("a", None, max_new_tokens=1), asked("b", CASES["choice"][0], max_new_tokens=1)
    )
    tops = [(each.id, each.logprob) for each in free.tokens[0].top]
    # Torch's products may differ in the last bit between rows of one batch, depending on how memory is aligned.
    assert [each.id for each in forced.tokens[0].top] == [token_id for token_id, _ in tops]
    assert [each.logprob for each in forced.tokens[0].top] == pytest.approx([logprob for _, logprob in tops], abs=1e-5)
    assert forced.tokens[0].logprob <= free.tokens[0].top[0].logprob < 0


@pytest.fixture(scope="module")
def compiler(checkpoint: Callable[[str], Path]) -> GrammarCompiler:
    return GrammarCompiler(checkpoint("qwen2"))


@pytest.mark.parametrize(
    "sampling",
    [
        {"min_new_tokens": 50},
        {"logit_bias": dict.fromkeys(range(VOCAB_SIZE), -100.0)},
        {"repetition_penalty": 90.0},
        {},
    ],
)
def test_a_structure_comes_before_other_wishes(compiler: GrammarCompiler, sampling: dict[str, Any]) -> None:
    """After the whole of "yes" only the end may come, also where a minimum length forbids it."""
    masks = TokenMasks(compiler, VOCAB_SIZE)
    sampler = Sampler(masks)
    sequence = SequenceState(asked("r", Structure(StructureKind.CHOICE, choices=("yes",)), **sampling))
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    for _ in range(4):
        masks.begin([sequence])
        sequence.token_ids.append(sample(sampler, logits, [sequence])[0].id)
    assert sequence.token_ids[-1] == EOS_TOKEN_ID
    assert torch.equal(logits, before)


def test_steps_in_flight_have_masks_of_their_own(compiler: GrammarCompiler) -> None:
    masks = TokenMasks(compiler, VOCAB_SIZE)
    sampler = Sampler(masks)
    yes, no = (SequenceState(asked(word, Structure(StructureKind.CHOICE, choices=(word,)))) for word in ("yes", "no"))
    steps = [[yes], [SequenceState(make_request("free", PROMPT))], [no]]
    logits = torch.randn(1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    for step in steps:
        masks.begin(step)
    together = [sample(sampler, logits, step)[0].id for step in steps]
    for step, token_id in zip(steps, together, strict=True):
        masks.begin(step)
        assert sample(sampler, logits, step)[0].id == token_id
    assert together[1] == int(logits.argmax())
    assert len({*together}) == len(together)


def test_a_grammar_that_becomes_too_much_work_ends_its_sequence_only(runner: ModelRunner) -> None:
    """What was generated elsewhere cannot be followed: the row fails, its neighbours go on."""
    good = asked("a", CASES["schema"][0])
    bad = replace(asked("b", CASES["choice"][0]), token_ids=(*PROMPT, 1, 2), attempt=1)
    driver = Driver(runner)
    runs = [driver.add(good), driver.add(bad)]
    first, second = driver.step(*[(run, run.sequence.num_uncomputed_tokens) for run in runs])
    assert first.failure is None
    assert str(second.failure).startswith("choice cannot be followed any further")
    for run in runs:
        runner.forget(run.sequence)
    assert runner._masks._grammars == {}


def test_what_it_costs_can_be_measured(tmp_path: Path) -> None:
    """On a vocabulary too large for a list of bytes; sequences that end begin anew."""
    end = write_vocabulary(tmp_path, 700)
    costs = measure(tmp_path, 700, end, num_seqs=3, num_steps=40)
    assert len(costs.make_s) == len(costs.apply_s) == 40
    assert all(seconds > 0 for seconds in costs.make_s)
