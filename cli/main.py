"""Entry point of the `tandem` command: one module per subcommand."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

import tandem
from cli import breakdown, chat, generate, keys, models, plan, up, workers
from mesh.domain.errors import ConfigurationError


class Command(Protocol):
    """What a subcommand's module has."""

    NAME: str
    ABOUT: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare its arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit status."""


COMMANDS: tuple[Command, ...] = (up, generate, chat, workers, models, keys, breakdown, plan)

_ADVICE = {
    tandem.ConnectionFailed: "is the mesh running? start it with: tandem up",
    tandem.Unauthenticated: "set TANDEM_API_KEY",
    tandem.NoWorkers: "see: tandem workers",
    tandem.ModelNotFound: "see: tandem models",
    tandem.Overloaded: "try again a little later",
    tandem.InternalError: "the services' logs have the details",
}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see: {self.prog} --help)\n")


def build_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands."""
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
    """Run the command that `argv` names; returns the exit status."""
    return execute(build_parser().parse_args(argv))


def execute(args: argparse.Namespace) -> int:
    """Run one command. Returns 2 for a wrong configuration, 1 for anything else that failed."""
    try:
        status: int = args.run(args)
    except ConfigurationError as error:
        return _complain(str(error), 2)
    except tandem.TandemError as error:
        advice = _ADVICE.get(type(error))
        return _complain(f"{error}; {advice}" if advice else str(error), 1)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left; Python must not complain about it when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _complain(message: str, status: int) -> int:
    sys.stderr.write(f"tandem: {' '.join(message.split())}\n")
    return status
