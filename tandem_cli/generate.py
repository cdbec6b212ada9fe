"""`tandem generate`: answers one prompt."""

import argparse
import json
import sys

from rich.console import Console

import tandem
from mesh.domain.errors import ConfigurationError
from tandem import GenerateArguments
from tandem_cli.connection import add_connection_arguments, add_sampling_arguments, open_client
from tandem_cli.parser import CommandParser
from tandem_cli.terminal import Painter, StreamedAnswer, escape_json_controls, show_answer


def add_arguments(parser: CommandParser) -> None:
    add_connection_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="apply the chat template (default if the model has one)")
    form.add_argument("--raw", action="store_true", help="continue the prompt as plain text, without the chat template")
    parser.add_argument("--model", help="served model, or a LoRA adapter of one (default: the only model)")
    add_sampling_arguments(parser)
    parser.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest tokens that have this share")
    parser.add_argument("--top-k", type=int, metavar="K", help="draw from so many of the likeliest tokens")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="stop before this text; repeatable")
    parser.add_argument("--top-logprobs", type=int, metavar="K", help="alternatives to report per token (with --json)")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="how long the whole answer may take")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the stream")


def run(args: argparse.Namespace) -> int:
    """Print the answer on stdout, and the line of statistics on stderr."""
    with open_client(args) as client:
        arguments = _arguments(args, client)
        answer = StreamedAnswer()
        if args.json:
            for event in client.stream(**arguments):
                answer.add(event)
            sys.stdout.write(escape_json_controls(json.dumps(describe(answer), ensure_ascii=False)) + "\n")
            return 0
        show_answer(client.stream(**arguments), answer, Painter.of(Console()))
        sys.stderr.write(answer.summary() + "\n")
    return 0


def describe(answer: StreamedAnswer) -> dict[str, object]:
    """The answer as `--json` prints it."""
    return {
        "request_id": answer.request_id,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "confidence": answer.confidence,
        "ttft_s": answer.ttft_s,
        "tokens_per_s": answer.tokens_per_s,
        "tokens": [_describe_token(token) for token in answer.tokens],
    }


def _describe_token(token: tandem.Token) -> dict[str, object]:
    entry: dict[str, object] = {"id": token.id, "text": token.text, "logprob": token.logprob, "special": token.special}
    if token.top:
        entry["top"] = [{"id": top.id, "text": top.text, "logprob": top.logprob} for top in token.top]
    return entry


def _arguments(args: argparse.Namespace, client: tandem.Client) -> GenerateArguments:
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    arguments: GenerateArguments = {
        "model": args.model,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "top_k": args.top_k,
        "seed": args.seed,
        "stop": args.stop,
        "top_logprobs": args.top_logprobs,
        "timeout": args.timeout,
    }
    if _wants_chat(args, client):
        arguments["messages"] = [{"role": "user", "content": text}]
    else:
        arguments["prompt"] = text
    return arguments


def _wants_chat(args: argparse.Namespace, client: tandem.Client) -> bool:
    if args.raw:
        return False
    has_template = client.model(args.model or "", timeout=10).has_chat_template
    if args.chat and not has_template:
        raise ConfigurationError("this model has no chat template: leave out --chat")
    return has_template
