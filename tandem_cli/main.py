"""Entry point of the `tandem` command: one module per subcommand."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

import tandem
from mesh.domain.errors import ConfigurationError
from tandem_cli import bench, breakdown, chat, generate, keys, models, plan, up, workers
from tandem_cli.colours import strip_controls


class Command(Protocol):
    """The interface of a module that implements a subcommand."""

    NAME: str
    ABOUT: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int:
        """Run the command; returns the exit status."""


COMMANDS: tuple[Command, ...] = (up, generate, chat, workers, models, keys, bench, plan, breakdown)

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


def build_parser() -> argparse.ArgumentParser:
    """The parser of the `tandem` command with all subcommands."""
    parser = _Parser(prog="tandem", description="Serves large language models with prefill and decode separated.")
    parser.add_argument("--version", action="version", version=f"tandem {tandem.__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.NAME, help=command.ABOUT, description=command.ABOUT, allow_abbrev=False
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` and run the subcommand; returns the exit status."""
    return execute(build_parser().parse_args(argv))


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
