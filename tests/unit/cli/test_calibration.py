"""Prompts of `tandem quantize`: how they are read, cut and held out; and the options of the command."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from mesh.domain.errors import ConfigurationError
from tandem_cli.main import parse_arguments
from tandem_cli.model_files.calibration import CalibrationPrompts, read_prompts
from tandem_cli.model_files.model_folders import BUNDLED

MODEL = BUNDLED


def read(
    tmp_path: Path, *lines: Any, max_prompts: int = 100, max_tokens: int = 50, model: Path = MODEL
) -> CalibrationPrompts:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_prompts(path, model, vocab_size=1024, max_prompts=max_prompts, max_tokens=max_tokens)


def ids(*numbers: int) -> dict[str, list[int]]:
    return {"token_ids": list(numbers)}


@pytest.mark.parametrize(("count", "held_out"), [(2, [1]), (3, [2]), (4, [3]), (5, [3]), (8, [3, 7]), (11, [3, 7])])
def test_one_of_four_is_held_out(tmp_path: Path, count: int, held_out: list[int]) -> None:
    prompts = read(tmp_path, *(ids(number, 5) for number in range(count)))
    assert [first for first, _ in prompts.held_out] == held_out
    assert sorted(first for first, _ in (*prompts.calibration, *prompts.held_out)) == list(range(count))


def test_long_prompts_are_cut_and_more_are_left(tmp_path: Path) -> None:
    prompts = read(tmp_path, ids(1, 2, 3), ids(4, 5), ids(6, 7), max_prompts=2, max_tokens=2)
    assert prompts == CalibrationPrompts(((1, 2),), ((4, 5),), num_cut=1, num_left=1)


@pytest.mark.parametrize("member", ["prompt", "messages", "reference"])
def test_long_text_costs_what_is_kept_of_it(tmp_path: Path, member: str) -> None:
    """All of it would take seconds of CPU time, and gigabytes."""
    words = "The quick brown fox, no. 7. " * 150_000
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    line = {
        "prompt": {"prompt": words},
        "messages": {"messages": [{"role": "user", "content": words}]},
        "reference": chat | {"reference": words},
    }[member]
    begun_s = time.process_time()
    long, _ = read(tmp_path, line, ids(1, 2), ids(1, 2), ids(1, 2)).calibration[:2]
    assert time.process_time() - begun_s < 2
    few = json.loads(json.dumps(line).replace(words, words[:1400]))
    short, _ = read(tmp_path, few, ids(1, 2), ids(1, 2), ids(1, 2)).calibration[:2]
    assert long == short
    assert len(long) == 50


def test_text_is_not_cut_or_padded_by_the_tokenizers_file(tmp_path: Path) -> None:
    lines = [{"prompt": "Spell tandem, and count its letters."}, {"prompt": "Hello there"}]
    native = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    native.enable_truncation(2)
    native.enable_padding(length=30)
    native.save(str(tmp_path / "tokenizer.json"))
    assert read(tmp_path, *lines, model=tmp_path) == read(tmp_path, *lines)


def test_text_becomes_what_the_router_makes_of_it(tmp_path: Path) -> None:
    """Chats that end with an answer end with it; others with the beginning of one."""
    question, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}
    lines = [{"prompt": "Hi there"}, {"messages": [question]}, {"messages": [question, answer]}, ids(1, 2)]
    text, asked, answered, referred = read(
        tmp_path, *lines, {"messages": [question], "reference": answer["content"]}
    ).calibration
    assert 1 not in text
    assert asked == (1, 4, *asked[2:-2], 2, 5), "begin, user, ..., end, assistant"
    assert answered[: len(asked)] == asked
    assert answered[: len(referred)] == referred != asked
    assert answered[-1] == 2


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "has no lines"),
        ([ids(1, 2)], "has one prompt .* two are needed"),
        ([ids(1, 2), ids(3)], "prompt 2: it has fewer than two tokens"),
        ([ids(1, 2), ids(3, 1024)], "prompt 2: token 1024 is not in the model's vocabulary of 1024"),
        ([ids(1, 2), {"input_tokens": 9}], "prompt 2: input_tokens stands for a random prompt"),
        ([ids(1, 2), {"text": "x"}], "line 2: give exactly one of prompt, messages"),
        ([ids(1, 2), {"messages": [{"role": "user", "content": ["x"]}]}], "prompt 2: role and content of messages"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, lines: list[Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(tmp_path, *lines)


def test_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", "model", "out", "--scheme", "awq", "--data", "d.jsonl"]
    args = parse_arguments(words)
    assert (args.model, args.out, args.scheme, args.data) == ("model", Path("out"), "awq", Path("d.jsonl"))
    assert (args.group_size, args.alpha, args.max_prompts, args.max_tokens, args.json) == (None, None, 256, 512, False)
    for missing in ("--scheme", "--data"):
        place = words.index(missing)
        with pytest.raises(SystemExit):
            parse_arguments(words[:place] + words[place + 2 :])
        assert f"the following arguments are required: {missing}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse_arguments([*words[:4], "int3", *words[5:]])
    assert "argument --scheme: invalid choice: 'int3'" in capsys.readouterr().err
