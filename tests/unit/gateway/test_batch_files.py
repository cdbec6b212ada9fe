"""The two files of a batch: what can be sent, and what was answered."""

import json
from pathlib import Path

from gateway.batches.files import AnswerFile


def test_an_answer_with_half_a_surrogate_pair_is_kept(tmp_path: Path) -> None:
    """Another gateway may send one, as JSON allows."""
    path = tmp_path / "out.jsonl"
    with AnswerFile(path) as answers:
        answers.write("a", 200, "", {"text": "cut: \ud83d, whole: \U0001f600"})
    with AnswerFile(path) as answers:
        assert answers.done == {"a"}
    (line,) = path.read_text(encoding="utf-8").split("\n")[:-1]
    assert json.loads(line)["response"]["body"] == {"text": "cut: \ud83d, whole: \U0001f600"}
