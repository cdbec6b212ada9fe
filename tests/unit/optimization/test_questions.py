"""The user's prompts, references and judge."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.optimize.judge import judge
from examples.optimize.questions import lines
from mesh.domain.errors import ConfigurationError
from tandem_cli.optimization.questions import Question, digest_of, load_judge, read_questions

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!"}


def read(tmp_path: Path, *entries: Any) -> list[Question]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return read_questions(path, 32)


def test_references(tmp_path: Path) -> None:
    plain, referred, answered = read(
        tmp_path,
        {"prompt": "Hi"},
        {"prompt": "Hi", "reference": "Hello", "max_tokens": 5},
        {"messages": [USER, ANSWER]},
    )
    assert (plain.reference, plain.job.max_tokens) == (None, 32)
    assert (referred.reference, referred.job.max_tokens) == ("Hello", 5)
    assert (answered.reference, answered.job.messages) == ("Hello!", (USER,))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "has no lines"),
        ([{"prompt": "Hi", "reference": 3}], "prompt 1: reference must be a text"),
        ([{"prompt": "Hi"}, {"input_tokens": 3}], "prompt 2: input_tokens stands for a random prompt"),
        ([{"messages": [ANSWER]}], "prompt 1: there is an answer, but no question"),
        ([{"text": "Hi"}], "line 1: give exactly one of"),
    ],
)
def test_bad_data_is_named(tmp_path: Path, entries: list[Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        read(tmp_path, *entries)


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    first = digest_of(read(tmp_path, {"prompt": "a"}))
    assert first == digest_of(read(tmp_path, {"prompt": "a"}))
    assert first != digest_of(read(tmp_path, {"prompt": "a", "reference": "x"}))


def write_judge(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "judge.py"
    path.write_text(text)
    return path


def test_a_judge_is_run(tmp_path: Path) -> None:
    chosen = load_judge(write_judge(tmp_path, "def judge(line, answer):\n    return answer == line['x']\n"))
    assert (chosen({"x": "a"}, "a"), chosen({"x": "a"}, "b")) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nothing_of_that_name", "cannot be run: ModuleNotFoundError"),
        ("x = 1", "has no function judge"),
        ("def judge(line, answer):\n    return line['y']", "judge failed: KeyError: 'y'; line: {}"),
        ("def judge(line, answer):\n    return 2", "judge must return 0 to 1, got 2"),
        ("def judge(line, answer):\n    return 'x'", "judge failed: ValueError"),
        ("import sys\nsys.exit('no key')", "cannot be run: SystemExit: no key"),
        ("import sys\ndef judge(line, answer):\n    sys.exit(0)", "judge failed: SystemExit: 0"),
    ],
)
def test_bad_judges_are_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        load_judge(write_judge(tmp_path, text))({}, "")


def test_sigterm_ends_a_judge_as_it_ends_the_rest(tmp_path: Path) -> None:
    text = "from mesh.interrupts import Terminated\ndef judge(line, answer):\n    raise Terminated(143)"
    with pytest.raises(SystemExit, match="143"):
        load_judge(write_judge(tmp_path, text))({}, "")


def test_a_missing_judge_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--judge must be a Python file"):
        load_judge(tmp_path / "none.py")


def test_the_examples(tmp_path: Path) -> None:
    entries = lines(40)
    questions = read(tmp_path, *entries)
    assert len(questions) == 40
    assert all(question.reference for question in questions)
    assert judge(entries[0], str(entries[0]["reference"])) == 1.0
    assert judge(entries[0], "no") == 0.0
