"""The user's prompts with what their answers are judged by: references, and a function of the user's.

A chat that ends with the assistant's message is a question with a reference, as for `tandem quantize`.
"""

import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from mesh.domain.errors import ConfigurationError
from mesh.interrupts import Terminated
from tandem_cli.load_test.jobs import Job, Lengths, read_entries

Judge = Callable[[dict[str, Any], str], float]
"""`judge(line of the data, answer)`: from 0, wrong, to 1, right."""


@dataclass(frozen=True, slots=True)
class Question:
    """`line` is the object in the file."""

    line: dict[str, Any]
    job: Job
    reference: str | None


def read_questions(path: Path, output_tokens: int) -> list[Question]:
    """The questions of a file of JSON lines. Raises ConfigurationError."""
    entries = read_entries(path, Lengths(output_tokens=output_tokens))
    questions = []
    for number, (line, job) in enumerate(entries, start=1):
        reference = line.get("reference")
        if reference is not None and not isinstance(reference, str):
            raise ConfigurationError(f"{path}, prompt {number}: reference must be a text, got {reference!r}")
        if job.ignore_eos:
            raise ConfigurationError(
                f"{path}, prompt {number}: input_tokens stands for a random prompt: give prompt, messages or token_ids"
            )
        messages = job.messages or ()
        if messages and messages[-1]["role"] == "assistant":
            reference = messages[-1]["content"] if reference is None else reference
            job = replace(job, messages=messages[:-1])
            if not job.messages:
                raise ConfigurationError(f"{path}, prompt {number}: there is an answer, but no question")
        questions.append(Question(line, job, reference))
    return questions


def digest_of(questions: Sequence[Question]) -> str:
    """Tells runs with other questions apart."""
    text = json.dumps([[question.line, question.job.max_tokens] for question in questions], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def load_judge(path: Path) -> Judge:
    """The function `judge` of a Python file, which is run. Raises ConfigurationError."""
    spec = importlib.util.spec_from_file_location("tandem_user_judge", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigurationError(f"--judge must be a Python file with a function judge(line, answer), got {path}")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Terminated:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    judge = getattr(module, "judge", None)
    if not callable(judge):
        raise ConfigurationError(f"{path} has no function judge(line, answer)")

    def checked(line: dict[str, Any], answer: str) -> float:
        try:
            score = float(judge(line, answer))
        except Terminated:
            raise
        except (Exception, SystemExit) as error:
            raise ConfigurationError(f"{path}: judge failed: {type(error).__name__}: {error}; line: {line}") from error
        if not 0 <= score <= 1:
            raise ConfigurationError(f"{path}: judge must return 0 to 1, got {score:g}; line: {line}")
        return score

    return checked
