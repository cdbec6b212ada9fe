"""`tandem batch`: answers a file of requests, in OpenAI's batch format, with capacity that nobody else uses."""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import MofNCompleteColumn, TimeRemainingColumn

from gateway.batches.files import AnswerFile, BatchRefused, check_requests, read_requests
from mesh.domain.errors import ConfigurationError
from mesh.interrupts import run_async
from mesh.settings import load_settings, setting
from tandem_cli.parser import count, not_negative, positive
from tandem_cli.terminal import error_console, progress_bar

if TYPE_CHECKING:
    from gateway.batches.send import Tally

_CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The key is read from the environment only: command lines are visible to other users."""

    api_key: str | None = setting(None, "credential for the gateway", secret=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("requests", type=Path, metavar="IN", help="JSON lines: custom_id, method, url, body")
    about = "answers are appended to it; requests that it answers already are not sent again"
    parser.add_argument("answers", type=Path, metavar="OUT", help=about)
    about = "HTTP gateway (http://127.0.0.1:8080); an API key comes from the variable TANDEM_API_KEY"
    parser.add_argument("--url", default="http://127.0.0.1:8080", metavar="URL", help=about)
    parser.add_argument("--concurrency", type=count, default=16, metavar="N", help="requests under way at a time (16)")
    about = "seconds for which a request is sent again while the gateway has no capacity or is away (3600)"
    parser.add_argument("--patience", type=not_negative, default=3600.0, metavar="S", help=about)
    about = "seconds that one try may take, more than the gateway's request_timeout_s (660)"
    parser.add_argument("--timeout", type=positive, default=660.0, metavar="S", help=about)


def run(args: argparse.Namespace) -> int:
    """Return 0 if every request has an answer that is no error, else 1. Answers of earlier runs count, too."""
    if not args.url.lower().startswith(("http://", "https://")):
        raise ConfigurationError(f"--url must begin with http:// or https://, {args.url!r} does not")
    if args.requests.exists() and args.answers.exists() and args.requests.samefile(args.answers):
        raise ConfigurationError("IN and OUT must be two files")
    for path in (args.requests, args.answers):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigurationError(
                f"{path} is no regular file: IN is read twice, and OUT is read before it is written"
            )
    try:
        ids = check_requests(args.requests)
        columns = (MofNCompleteColumn(), TimeRemainingColumn())
        with AnswerFile(args.answers) as answers, progress_bar(error_console(), *columns) as bar:
            num_before, num_refused_before = len(ids & answers.done), len(ids & answers.refused)
            task = bar.add_task("answers", total=len(ids), completed=num_before)
            tally = run_async(_send_all(args, answers, lambda: bar.advance(task)))
    except BatchRefused as refused:
        raise ConfigurationError(str(refused)) from None
    except OSError as error:
        raise ConfigurationError(f"{args.answers}: {error.strerror or error}") from error
    sys.stderr.write(_summary(tally, num_before, num_refused_before))
    return 1 if tally.num_refused or tally.num_left or num_refused_before else 0


async def _send_all(args: argparse.Namespace, answers: AnswerFile, on_done: Callable[[], object]) -> "Tally":
    import httpx2

    from gateway.batches.send import Sender

    key = load_settings(BatchSettings, [], prog="batch").values.api_key
    url = args.url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx2.Timeout(args.timeout, connect=_CONNECT_TIMEOUT_S)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=args.concurrency)
    try:
        http = httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout, limits=limits)
    except ValueError as error:
        raise ConfigurationError(f"--url: {error}") from None
    async with http:
        sender = Sender(http, patience_s=args.patience, on_wait=_say_why)
        await sender.send_all(read_requests(args.requests, frozenset(answers.done)), answers, args.concurrency, on_done)
    return sender.tally


def _say_why(problem: str) -> None:
    sys.stderr.write(f"waiting for capacity: {problem}\n")


def _summary(tally: "Tally", num_before: int, num_refused_before: int) -> str:
    phrases = [f"{tally.num_answered} answered"]
    refused = f", {num_refused_before} of them refused" if num_refused_before else ""
    phrases += [f"{num_before} were answered before{refused}"] if num_before else []
    phrases += [f"{tally.num_refused} refused: see their status_code"] if tally.num_refused else []
    phrases += [f"{tally.num_left} left, run it again: {tally.last_problem}"] if tally.num_left else []
    return "; ".join(phrases) + "\n"
