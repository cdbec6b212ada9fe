"""The text of a served model: how its prompts are encoded, and the structures that it refuses."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tokenizers import AddedToken, normalizers

from checkpoint.grammar import GrammarCompiler
from mesh.domain.errors import InvalidRequest
from mesh.domain.structure import Structure, StructureKind
from router.served_model import ServedModel
from router.text.chat import TextPrompt
from router.text.input_processor import EncodedPrompt, Grammars, PromptEncoder
from router.text.tokenizer import Tokenizer, max_token_chars
from tests.defects import Repaired
from tests.fakes.router_model import BOS, BOS_ID, EOS, EOS_ID, byte_level_tokenizer, write_checkpoint
from tests.fakes.tokenizers import write_gpt2, write_llama, write_t5
from tests.waiting import LIMIT_S

BUNDLED = Path(__file__).resolve().parents[3] / "demo_model" / "tandem-small"
TEXTS = st.text(st.sampled_from(" \n\t.=aehlo1é日😀\u0301<|>")) | st.text()
GOOD = Structure(StructureKind.REGEX, "a+")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptEncoder]:
    made = PromptEncoder(ServedModel.load("tiny", write_checkpoint(tmp_path_factory.mktemp("model"))), None)
    yield made
    made.close()


def test_the_end_of_a_prompt_has_no_known_text() -> None:
    prompt = EncodedPrompt((1, 2, 3), "abc")
    assert prompt.last(None) is prompt
    assert prompt.last(3) is prompt
    assert prompt.last(2) == EncodedPrompt((2, 3), None)


def test_the_tokenizers_end_token_ends_answers_too(tmp_path: Path) -> None:
    """Fine-tuned models may name theirs there only."""
    folder = write_checkpoint(tmp_path)
    config, tokenizer_config = folder / "config.json", folder / "tokenizer_config.json"
    configured = json.loads(config.read_text())
    assert ServedModel.load("tiny", folder).facts.eos_token_ids == {configured["eos_token_id"]}
    config.write_text(json.dumps(configured | {"eos_token_id": 7}))
    model = ServedModel.load("tiny", folder)
    assert model.facts.eos_token_ids == {7, configured["eos_token_id"]} <= model.tokenizer.special_ids
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"eos_token": "none such"}))
    assert ServedModel.load("tiny", folder).facts.eos_token_ids == {7}


def test_stop_strings_of_the_model_are_texts_or_end_tokens(tmp_path: Path) -> None:
    """The name of a special token is in no text, so the token itself has to end answers."""
    folder = write_checkpoint(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"stop_strings": ["###", BOS]}))
    plain, model = (ServedModel.load("tiny", folder, with_recommended=each) for each in (False, True))
    assert (plain.stop_strings, model.stop_strings) == ((), ("###",))
    assert plain.facts.eos_token_ids == {EOS_ID}
    assert model.facts.eos_token_ids == {EOS_ID, BOS_ID}


def test_clients_are_told_of_a_tokenizer_what_transformers_says_of_it(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, chat_template=None)
    image = {"content": "<image>", "lstrip": False, "normalized": False, "rstrip": False, "special": True}
    facts = {
        "additional_special_tokens": [image, "<b>"],
        "extra_special_tokens": {"image_token": image, "content": "<c>"},
        "chat_template": [{"name": "rag", "template": "{{ messages }}"}],
        "model_max_length": math.inf,
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))
    assert ServedModel.load("tiny", folder).tokenizer_config == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "additional_special_tokens": ["<image>", "<b>"],
        "extra_special_tokens": {"image_token": "<image>", "content": "<c>"},
        "model_max_length": None,
    }


def test_a_model_without_an_end_in_its_vocabulary_is_reported(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path)
    config, tokenizer_config = folder / "config.json", folder / "tokenizer_config.json"
    configured = json.loads(config.read_text())
    tokenizer_config.write_text(json.dumps(json.loads(tokenizer_config.read_text()) | {"eos_token": None}))
    for ids, is_reported in ((99_999, True), ([99_999, 7], False), (None, False)):
        config.write_text(json.dumps(configured | {"eos_token_id": ids}))
        with capture_logs() as logs:
            ServedModel.load("tiny", folder)
        assert [line["event"][:43] for line in logs] == is_reported * ["no end token is in the vocabulary, so answe"]


def test_words_are_ruled_out_with_and_without_a_space(encoder: PromptEncoder) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(encoder.tokenizer.encode(text, add_special_tokens=False))

    assert ids(" fox")[-len(ids("fox")) :] != ids("fox"), "the space is part of its token"
    assert set(encoder.spellings(["fox"])) == set(encoder.spellings([" fox"])) == {ids("fox"), ids(" fox")}
    assert ids(" 7") == (*ids(" "), *ids("7"))
    assert encoder.spellings(["7"]) == (ids("7"),), "which rules out a 7 behind a space, too"
    assert encoder.spellings(["7", "7"]) == (ids("7"),)


@pytest.fixture(scope="module", params=["gpt2", "llama", "bundled"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizers")
    if request.param == "bundled":
        return Tokenizer.load(BUNDLED, frozenset())
    return Tokenizer.load((write_gpt2 if request.param == "gpt2" else write_llama)(folder / request.param), frozenset())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.integers(1, 30))
def test_no_text_has_more_characters_than_its_tokens_can_stand_for(tokenizer: Tokenizer, text: str, times: int) -> None:
    ids = tokenizer.encode(text * times, add_special_tokens=False)
    most = tokenizer.max_chars(len(ids))
    assert most is not None
    assert len(text * times) <= most
    assert ids == tokenizer._native.encode(text * times, add_special_tokens=False).ids


def test_tokenizers_that_drop_text_have_no_bound(tmp_path: Path) -> None:
    assert Tokenizer.load(write_t5(tmp_path), frozenset()).max_chars(10) is None
    native = byte_level_tokenizer()
    assert max_token_chars(native) == 13
    native.normalizer = normalizers.NFC()
    assert max_token_chars(native) == 4 * 13
    native.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    assert max_token_chars(native) is None
    native.normalizer = normalizers.Replace("  ", " ")
    assert max_token_chars(native) is None
    native.normalizer = None
    native.add_tokens([AddedToken("<|x|>", rstrip=True)])
    assert max_token_chars(native) is None, "it swallows any number of spaces"


async def test_a_text_that_cannot_fit_is_refused_without_tokenising(
    encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    def encode(*_: object, **__: object) -> None:
        raise AssertionError("it was tokenised")

    text = "hello world " * 350_000
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "encode", encode)
        began_s = time.process_time()
        with pytest.raises(InvalidRequest, match="4200000 characters, and at most 6500 fit into the 500"):
            await encoder.encode(TextPrompt(text), max_tokens=500)
        took_ms = 1000 * (time.process_time() - began_s)
    assert took_ms < 10
    assert (await encoder.encode(TextPrompt(text[:6500]), max_tokens=500)).text == text[:6500]
    repaired("D3", f"4 MB for 500 tokens: refused in {took_ms:.1f} ms, not tokenised")


async def test_a_long_text_holds_no_lock_and_no_short_text(encoder: PromptEncoder, repaired: Repaired) -> None:
    """A thread that holds the lock would let this one run only when it is done."""
    text = "hello world, the quick brown fox " * 60_000
    running = asyncio.create_task(encoder.encode(TextPrompt(text), tenant="greedy"))
    began_s = last_s = time.monotonic()
    longest_s, num_short = 0.0, 0
    while not running.done():
        await encoder.encode(TextPrompt(text[:5000]), tenant="modest")
        num_short += not running.done()
        now_s = time.monotonic()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    whole_s = time.monotonic() - began_s
    assert len((await running).ids) > 500_000
    assert num_short >= 5
    assert longest_s < whole_s / 3, "the lock was held"
    repaired("D3", f"2 MB tokenised in {whole_s:.1f} s: {num_short} texts of 5,000 characters done meanwhile")


@pytest.mark.parametrize("num_chars", [1, 2000, 100_000])
async def test_text_with_half_a_character_is_refused(encoder: PromptEncoder, num_chars: int) -> None:
    """Protobuf's strings cannot have it, but what a template makes of JSON can."""
    text = "x" * num_chars + "\ud83d"
    with pytest.raises(InvalidRequest, match=r"the prompt has \\ud83d, half of a surrogate pair"):
        await encoder.encode(TextPrompt(text))
    assert len((await encoder.encode(TextPrompt(text[:-1] + "\U0001f600"))).ids) > 0


async def test_structures_are_tried(tmp_path: Path) -> None:
    grammars = Grammars(write_checkpoint(tmp_path / "tiny"))
    await grammars.check(None)
    await grammars.check(GOOD)
    with pytest.raises(InvalidRequest, match="regex cannot be used"):
        await grammars.check(Structure(StructureKind.REGEX, "(a"))
    grammars.close()


async def test_tenants_take_turns_at_compiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repaired: Repaired
) -> None:
    grammars, may_go, compiled = Grammars(tmp_path), threading.Event(), list[str]()

    def compile_slowly(_: GrammarCompiler, structure: Structure, scope: str) -> None:
        may_go.wait(LIMIT_S)
        compiled.append(scope)

    monkeypatch.setattr(GrammarCompiler, "compile", compile_slowly)
    tenants = ["greedy"] * 40 + ["modest"]
    checks = [asyncio.create_task(grammars.check(GOOD, tenant)) for tenant in tenants]
    await asyncio.sleep(0)
    may_go.set()
    await asyncio.gather(*checks)
    grammars.close()
    assert compiled.index("modest") <= 2
    repaired("D34", f"of 41 structures, the other tenant's is number {compiled.index('modest') + 1}")


async def test_structures_can_be_turned_off(tmp_path: Path) -> None:
    """Then not even the tokenizer is looked for."""
    grammars = Grammars(tmp_path, disabled=True)
    await grammars.check(None)
    with pytest.raises(InvalidRequest, match="turned off"):
        await grammars.check(GOOD)
    grammars.close()
