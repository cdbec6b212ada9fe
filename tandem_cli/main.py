"""Entry point of the `tandem` command. Each subcommand is the module of its name, imported when it is chosen.

`tandem generate` therefore starts without the engine that `tandem plan` measures, and `tandem --help` imports no
command.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, Protocol, cast

import tandem
from mesh.domain.errors import ConfigurationError
from tandem_cli.terminal import strip_controls

COMMANDS = {
    "up": 'start a router and workers in the foreground; prints "ready HOST:PORT" on stdout once they serve',
    "generate": "answer one prompt; tokens are coloured by the model's confidence",
    "chat": "talk with the model; Ctrl-C stops an answer, Ctrl-D ends the conversation",
    "workers": "show the workers and their load",
    "models": "list the served models and their limits",
    "keys": "create API keys for tenants",
    "bench": "measure speed under load: latency, throughput, goodput and price, as a table, JSON and plots",
    "batch": "answer a file of requests in OpenAI's batch format, at the lowest priority; an interrupted run goes on",
    "partition": "write a model's weights as workers map them: packed, one file per tensor-parallel rank",
    "plan": "plan capacity: memory, concurrent users, best-case speed, workers for a load, and cost",
    "breakdown": "send sample requests and show where their time goes: queue, prefill, transfer, decode, ...",
}
"""All subcommands, with their descriptions."""

_ADVICE = {
    tandem.ConnectionFailed: "is the mesh running? start it with: tandem up",
    tandem.Unauthenticated: "set TANDEM_API_KEY",
    tandem.NoWorkers: "see: tandem workers",
    tandem.ModelNotFound: "see: tandem models",
    tandem.Overloaded: "try again a little later",
    tandem.InternalError: "the services' logs have the details",
}


class _Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see: {self.prog} --help)\n")


class Command(Protocol):
    """The interface of a subcommand's module."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit status."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, or the command line of this process. `run` of the result is that of the chosen subcommand."""
    argv = sys.argv[1:] if argv is None else argv
    chosen = next((word for word in argv if not word.startswith("-")), None)
    parser = _Parser(prog="tandem", description="Serves large language models with prefill and decode separated.")
    parser.add_argument("--version", action="version", version=f"tandem {tandem.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for name, about in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=about, description=about, allow_abbrev=False)
        if name == chosen:
            command = cast(Command, import_module(f"tandem_cli.{name}"))
            command.add_arguments(subparser)
            subparser.set_defaults(run=command.run)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` and run the subcommand; returns the exit status."""
    return execute(parse_arguments(argv))


def execute(args: argparse.Namespace) -> int:
    """Run one subcommand. Returns 2 for a wrong configuration, 130 after Ctrl-C, and 1 for any other failure."""
    try:
        status: int = args.run(args)
    except ConfigurationError as error:
        return _fail(str(error), 2)
    except tandem.TandemError as error:
        advice = _ADVICE.get(type(error))
        return _fail(f"{error}; {advice}" if advice else str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of stdout has gone. Redirect stdout, or Python reports an error when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _fail(message: str, status: int) -> int:
    sys.stderr.write(f"tandem: {strip_controls(' '.join(message.split()))}\n")
    return status
