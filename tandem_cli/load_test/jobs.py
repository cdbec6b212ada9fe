"""Requests of a load test: random prompts of fixed lengths, or lines of JSON from a file of the user."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json

T = TypeVar("T")

FIRST_ID = 3  # smaller ids are special tokens in most vocabularies
_INPUTS = ("prompt", "messages", "token_ids", "input_tokens")
# Field names in the traces that Mooncake publishes. Their `timestamp` is in milliseconds.
_ALIASES = {"input_length": "input_tokens", "output_length": "max_tokens"}
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")


@dataclass(frozen=True, slots=True)
class Job:
    """A request to send, with one of token_ids, prompt and messages. `arrival_s` is its arrival time in a trace."""

    max_tokens: int
    token_ids: tuple[int, ...] | None = None
    prompt: str | None = None
    messages: tuple[Mapping[str, str], ...] | None = None
    ignore_eos: bool = True
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens per prompt and answer. With `as_text` prompts are words, most of which are one token in most
    vocabularies.
    """

    input_tokens: int = 256
    output_tokens: int = 64
    vocab_size: int = 32000
    as_text: bool = False


def random_jobs(lengths: Lengths, count: int, seed: int | str) -> list[Job]:
    """`count` random jobs, determined by `seed`. Prompts share no prefix that a prefix cache could use."""
    rng = random.Random(seed)
    return [_random_job(lengths, rng) for _ in range(count)]


def _random_job(lengths: Lengths, rng: random.Random) -> Job:
    if lengths.as_text:
        return Job(lengths.output_tokens, prompt=" ".join(rng.choices(_WORDS, k=lengths.input_tokens)))
    ids = tuple(rng.randrange(FIRST_ID, lengths.vocab_size) for _ in range(lengths.input_tokens))
    return Job(lengths.output_tokens, token_ids=ids)


def read_jobs(path: Path, lengths: Lengths, seed: int | str = 0) -> list[Job]:
    """Jobs from a file of JSON lines. Raises ConfigurationError with the number of the bad line.

    A line has one of `prompt`, `messages`, `token_ids` and `input_tokens` (a random prompt of that length), and may
    have `max_tokens` and `arrival_s`. Answers end at the end-of-sequence token, except those to random prompts.
    """
    return [job for _, job in read_entries(path, lengths, seed)]


def read_entries(path: Path, lengths: Lengths, seed: int | str = 0) -> list[tuple[dict[str, Any], Job]]:
    """Like `read_jobs`, with the object of each line, which may have more members."""
    rng = random.Random(seed)

    def parse(entry: object) -> tuple[dict[str, Any], Job]:
        plain = _plain_names(entry)
        return plain, _parse(plain, lengths, rng)

    return _read_lines(path, parse)


def _read_lines(path: Path, parse: Callable[[Any], T]) -> list[T]:
    """`parse` each line; its ValueError becomes a ConfigurationError with the number of the line."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors of Windows begin files with a mark
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"cannot read {path}: byte {error.start} is not UTF-8 ({error.reason}): convert the file to UTF-8"
        ) from error
    parsed = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            if "\\u" in line:
                json.dumps(entry, ensure_ascii=False).encode()  # half of a surrogate pair is no text
            parsed.append(parse(entry))
        except json.JSONDecodeError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}; the line must be one JSON object") from error
        except ValueError as error:
            raise ConfigurationError(f"{path}, line {number}: {error}") from error
    if not parsed:
        raise ConfigurationError(f"{path} has no lines: it needs one JSON object a line")
    return parsed


def read_trace(path: Path, lengths: Lengths, seed: int | str = 0) -> list[Job]:
    """Like `read_jobs`, but every line needs an arrival time. Jobs are in order; times count from the first arrival."""
    jobs = read_jobs(path, lengths, seed)
    timed = [(job.arrival_s, job) for job in jobs if job.arrival_s is not None]
    if len(timed) < len(jobs):
        raise ConfigurationError(f"{path} is no trace: {len(jobs) - len(timed)} of {len(jobs)} lines have no arrival_s")
    timed.sort(key=lambda pair: pair[0])
    return [replace(job, arrival_s=at_s - timed[0][0]) for at_s, job in timed]


def cycle_to(jobs: Sequence[Job], count: int) -> Iterator[Job]:
    """`count` jobs; `jobs` is repeated from its beginning when it is exhausted."""
    return (jobs[number % len(jobs)] for number in range(count))


def read_shapes(path: Path) -> list[tuple[float, int, int]]:
    """Arrival times in seconds and lengths of prompts and answers, without the prompts themselves.

    Every line of the trace needs `arrival_s`, `max_tokens`, and `input_tokens` or `token_ids`. Raises
    ConfigurationError.
    """
    return _read_lines(path, lambda entry: _parse_shape(_plain_names(entry)))


def _parse_shape(entry: Mapping[str, Any]) -> tuple[float, int, int]:
    absent = [name for name in ("arrival_s", "max_tokens") if name not in entry]
    if absent or not ("input_tokens" in entry or "token_ids" in entry):
        raise ValueError(f"{' and '.join(absent or ['input_tokens'])} missing: only lengths can be simulated, no texts")
    num_input = entry["input_tokens"] if "input_tokens" in entry else len(_read_ids(entry["token_ids"]))
    return (
        _number(entry, "arrival_s"),
        _count(num_input, "input_tokens"),
        _count(entry["max_tokens"], "max_tokens"),
    )


def _plain_names(entry: object) -> dict[str, Any]:
    """The object of a line, with our names in place of Mooncake's."""
    if not isinstance(entry, dict):
        raise ValueError(f"expected an object, got {type(entry).__name__}: write one JSON object a line")
    plain: dict[str, Any] = {}
    for name, value in entry.items():
        plain[_ALIASES.get(str(name), str(name))] = value
    if "timestamp" in plain:
        plain["arrival_s"] = _number(plain, "timestamp") / 1000
    return plain


def _parse(entry: Mapping[str, Any], lengths: Lengths, rng: random.Random) -> Job:
    present = [name for name in _INPUTS if name in entry]
    if len(present) != 1:
        raise ValueError(f"give exactly one of {', '.join(_INPUTS)}; got {', '.join(present) or 'none'}")
    max_tokens = _count(entry.get("max_tokens", lengths.output_tokens), "max_tokens")
    arrival_s = _number(entry, "arrival_s") if "arrival_s" in entry else None
    if present == ["input_tokens"]:
        input_tokens = _count(entry["input_tokens"], "input_tokens")
        job = _random_job(replace(lengths, input_tokens=input_tokens, output_tokens=max_tokens), rng)
        return replace(job, arrival_s=arrival_s)
    inputs: dict[str, Any] = {present[0]: _READERS[present[0]](entry[present[0]])}
    return Job(max_tokens, ignore_eos=False, arrival_s=arrival_s, **inputs)


def _count(value: object, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
    return value


def _number(entry: Mapping[str, object], name: str) -> float:
    value = entry[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number >= 0, got {value!r}")
    return float(value)


def _read_prompt(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"prompt must be a text, got {value!r}")
    return value


def _read_ids(value: object) -> tuple[int, ...]:
    if (
        not isinstance(value, list)
        or not value
        or not all(type(token_id) is int and token_id >= 0 for token_id in value)
    ):
        raise ValueError("token_ids must be a list of whole numbers >= 0")
    return tuple(value)


def _read_messages(value: object) -> tuple[Mapping[str, str], ...]:
    if (
        not isinstance(value, list)
        or not value
        or not all(isinstance(turn, dict) and turn.keys() == {"role", "content"} for turn in value)
    ):
        raise ValueError('messages must be a list of {"role": ..., "content": ...}')
    return tuple(value)


_READERS = {"prompt": _read_prompt, "token_ids": _read_ids, "messages": _read_messages}
